"""Named tuples without `typing` and `collections`, which a shim would carry all its life.

Type checkers read `typing.NamedTuple`. `collections.namedtuple` alone adds 0.05 MiB to each of 200
shims (PSS, `python -m benchmarks shims`), whose goal of 2.5 MiB it misses by 0.01.
"""

from __future__ import annotations

__all__ = ["NamedTuple"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from _collections import _tuplegetter

    class NamedTuple(tuple):
        """A tuple with the annotated names of its class as fields."""

        __slots__ = ()

        def __init_subclass__(cls):
            names = cls._fields = cls.__match_args__ = tuple(cls.__annotations__)
            defaults = tuple(vars(cls)[name] for name in names if name in vars(cls))
            for place, name in enumerate(names):
                setattr(cls, name, _tuplegetter(place, ""))
            listed = ", ".join(names)
            code = f"lambda cls, {listed}: new(cls, ({listed},))"
            cls.__new__ = eval(code, {"new": tuple.__new__})  # noqa: S307 - names of this program
            cls.__new__.__defaults__ = defaults

        def __repr__(self):
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changes):
            return type(self)(**(self._asdict() | changes))
