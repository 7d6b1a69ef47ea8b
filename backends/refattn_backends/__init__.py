"""Plugins that run refattn on array libraries. They are judged by the specification and never judge.

One module per library, each with an object BACKEND; importing a module does not import its library.
"""
