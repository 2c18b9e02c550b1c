"""From what users have to a source: one module per framework.

`adapt(obj, class_names, *, batched)` of each returns an object of the framework as a
source, or None. The names of its class and its bases identify it, without importing the
framework; `batched` says whether elements are batches, and None infers it or asks.
"""
