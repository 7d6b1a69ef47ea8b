"""The calls, one module per chapter; and the clauses that no call's values can show."""

from __future__ import annotations

from certify.call import Book
from certify.recipes import arrays, biases, caches, gradients, heads, masks_by_index, numbers, scores, softmax, tiling

BOOKS: tuple[Book, ...] = (
    arrays.BOOK,
    scores.BOOK,
    masks_by_index.BOOK,  # and with it masks.BOOK, chapter M being in two modules
    softmax.BOOK,
    heads.BOOK,
    biases.BOOK,
    caches.BOOK,
    tiling.BOOK,
    gradients.BOOK,
    numbers.BOOK,
)

NOT_SHOWN: dict[str, str] = {
    "A7": "Libraries and devices are no numbers.",
    "S4": "It is about what is refused; leaving the soft cap out, as most vectors do, switches it off.",
    "S6": "An argument about random inputs, not about one call.",
    "M14": "It is about how a mask is evaluated; what it shows is that of the other clauses.",
    "M22": "A drawing is no number.",
    "G3": "Splitting heads is a function of its own.",
    "G4": "Pooling heads is a function of its own.",
    "G5": "It is about a layer's shapes.",
    "L1": "A layer's projections are not part of the call; its attention is that of the other clauses.",
    "L2": "A layer's projections are not part of the call; G1 shows shared heads.",
    "L3": "A layer's projections are not part of the call; A1 shows other keys than queries.",
    "L4": "A layer's projections are not part of the call; K2 shows rotary keys in a cache.",
    "L5": "Weights are expected values of every vector; that returning them changes nothing takes two calls.",
    "L6": "A layer's projections are not part of the call; A2 shows one head.",
    "K5": "It is about what is refused.",
    "K6": "It is about what is refused, and about traced calls.",
    "T4": "Memory is no value.",
    "D9": "It is about what a library differentiates, whose values are those of the other clauses.",
    "N2": "It is about traced calls, whose values are those of the other clauses.",
    "N3": "It is about what is refused.",
    "N4": "It takes two calls.",
    "N5": "A warning is no value.",
    "C1": "A count, not a call.",
    "C2": "A count, not a call.",
    "C3": "A count, not a call.",
    "C4": "A comparison of costs, not a call.",
    "X1": "It takes two calls, chosen for it; each is ordinary.",
    "X2": "It takes two calls, chosen for it; each is ordinary.",
    "E1": "It is about what is refused.",
    "E2": "It is about what is refused.",
    "E3": "It is about what is refused.",
    "E4": "Names are no numbers.",
    "E5": "It is about the files of these vectors themselves.",
}
