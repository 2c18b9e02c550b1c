"""From what users have to a source: one adapter for each kind of object."""
