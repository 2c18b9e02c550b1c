"""The usual pipeline of a TFDS data set: find it, read, decode, map, keep, shuffle."""
