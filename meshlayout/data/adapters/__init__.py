"""From what users have to a source: one module per framework.

`adapt(obj, class_names, *, batched)` of each returns an object of the framework as a
source, or None. `class_names` are those of the object's class and its bases, which
identify it without importing the framework; `batched` says whether the elements are
batches, and None infers it or asks.
"""
