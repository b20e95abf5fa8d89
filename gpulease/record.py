"""A record: a class with named fields, which costs a command next to nothing to import.

Type checkers read it as a dataclass. At run time there is no `dataclasses` module, which takes
longer to import than the interpreter to start. Defaults are plain values: no lists, no factories.
"""

from __future__ import annotations

__all__ = ["record", "replace"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as record
    from dataclasses import replace
else:

    def record(kind=None, *, frozen=False):
        """Give a class its constructor, comparison and repr.

        `frozen` makes it hashable; only type checkers prevent changes.
        """
        if kind is None:
            return lambda kind: record(kind, frozen=frozen)
        kind._names = tuple(kind.__annotations__)
        kind.__init__, kind.__eq__, kind.__repr__ = _init, _eq, _repr
        kind.__hash__ = _hash if frozen else None
        return kind

    def replace(one, **changes):
        """Return a copy of a record with some fields changed."""
        return type(one)(**{**vars(one), **changes})

    def _init(self, *values, **named):
        names, kind = self._names, type(self)
        given = dict(zip(names, values, strict=False), **named)
        if len(given) != len(values) + len(named) or not given.keys() <= set(names):
            raise TypeError(f"{kind.__name__}() takes {', '.join(names)}")
        for name in names:
            if name not in given:
                if not hasattr(kind, name):
                    raise TypeError(f"{kind.__name__}() lacks {name!r}")
                given[name] = getattr(kind, name)
        self.__dict__.update(given)

    def _eq(self, other):
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def _hash(self):
        return hash(tuple(vars(self)[name] for name in self._names))

    def _repr(self):
        fields = ", ".join(f"{name}={vars(self)[name]!r}" for name in self._names)
        return f"{type(self).__qualname__}({fields})"
