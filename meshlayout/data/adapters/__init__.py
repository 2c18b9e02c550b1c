"""From what users have to a source: one module for each framework.

Each has a function `adapt(obj, kinds, clock, *, batched)`, which returns an object of
the framework as a source, or None if it is of another kind. `kinds` are the names of
its class and their bases, by which it is recognized without importing the framework.
`clock` takes notes. `batched` is whether the elements are batches; None leaves it to
what the framework or the elements tell. What may be either is a DataError.
"""
