"""A source whose iterators tell their place, as Grain's do."""


class Seekable:
    def __init__(self, elements):
        self.elements = elements

    def __iter__(self):
        return SeekableIterator(self.elements)


class SeekableIterator:
    def __init__(self, elements):
        self.elements, self.at = elements, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.elements):
            raise StopIteration
        self.at += 1
        return self.elements[self.at - 1]

    def get_state(self):
        return {"next": self.at}

    def set_state(self, state):
        self.at = state["next"]

    def close(self):
        pass
