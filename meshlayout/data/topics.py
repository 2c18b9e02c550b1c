"""A small corpus of English that comes with Python."""

import importlib

from meshlayout.errors import DataError


def python_topics() -> list[str]:
    """Returns some English prose that every Python has: the topics of `help()`.

    About half a megabyte in eighty documents, from Python's reference manual, in the
    order of their names; the text is that of the Python that runs.

    Raises:
        DataError: If this Python was built without them.

    Example:
        >>> topics = python_topics()
        >>> len(topics) > 50 and all(isinstance(topic, str) for topic in topics)
        True
    """
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError:
        msg = (
            "this Python has no pydoc_data, a part of the standard library that holds "
            "the topics of help(). Give texts of your own."
        )
        raise DataError(msg) from None
    return [module.topics[name] for name in sorted(module.topics)]
