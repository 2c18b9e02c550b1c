"""From what users have to a source: one module per framework.

Each has a function `adapt(obj, class_names, clock, *, batched)`, which returns an
object of the framework as a source, or None if it does not support it. `class_names`
are those of the object's class and its bases, which identify it without importing the
framework. `clock` takes notes for the report. `batched` is whether the elements are
batches; None infers it from the framework or the elements, and raises DataError if they
could be either.

Only public APIs of a framework are used, except where a module says otherwise.
"""
