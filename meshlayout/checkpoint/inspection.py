class Inspection:
    @classmethod
    def of(cls, facts, n):
        return cls()


class InspectedLeaf: ...
