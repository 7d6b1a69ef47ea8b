"""Verdicts shown, each form in a module of its own.

terminal.py   a progress bar, the verdict, a table by clause, the most telling failure explained
files.py      where reports are written: checked before a run, replaced as a whole after it; JSON (report.schema.json)
junit.py      JUnit XML, for continuous integration
page.py       one self-contained HTML page, whose looks are in page.css
pictures.py   what a failing case looks like: visibility, expected, actual, error over bound
heatmap.py    a matrix as inline SVG
"""
