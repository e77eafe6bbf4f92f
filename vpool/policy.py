"""Policies: a strategy with all that a pool is told besides, in a file that people edit."""

import difflib
import inspect
import operator
import os
import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace

from vpool import sources
from vpool.errors import FormatError
from vpool.files import whole_file
from vpool.sizes import format_bytes, parse_size
from vpool.strategies import GRANULE, Dynamic, Fixed, Hybrid, Strategy

__all__ = ["FORMAT_VERSION", "Policy"]

FORMAT_VERSION = 1
MAX_ROUNDING = 2 << 20

_KINDS = {"dynamic": Dynamic, "fixed": Fixed, "hybrid": Hybrid}
_FITS = ("good",)
# Sources that can be made without a device, so that their options are checked early.
_ANYWHERE = ("host", "simulated", "simulated-vmm")
_TYPES = {str: "a string", bool: "a boolean", int: "an integer", float: "a float", list: "an array", dict: "a table"}
# What a file may have, beside what strategies and sources name themselves.
_KEYS = ("format_version", "rounding", "minimum_remainder", "fit", "strategy", "source")
_KEYS_OF_SOURCE = ("name",)


@dataclass(frozen=True)
class Policy:
    """All that says how a pool works: a strategy, how blocks are cut, and where memory comes from.

    Parameters
    ----------
    strategy : Dynamic, Fixed or Hybrid
        When and how much to ask of the source.
    rounding : int or str
        Bytes, a power of two from 256 to 2 MiB: requests are rounded up to a multiple of it.
    minimum_remainder : int or str
        Bytes, at least 256: where less would be left of a free block, the block is lent whole.
    fit : {"good"}
        How a free block is found: two-level segregated fit, which searches nothing.
    source : str, optional
        Where memory comes from, by a name of `vpool.sources`; the best that works on the machine if not given.
    source_options : dict
        Keyword options of that source, as of the functions in `vpool.sources`.  The device is not one of
        them: a pool is told where it is made.

    Raises
    ------
    ValueError, TypeError, OverflowError
        For numbers that make no sense, alone or together; the message names the parameter.

    Notes
    -----
    Thread safety: a policy never changes.

    Examples
    --------
    >>> Policy(Dynamic(growth=2.0), rounding="2KiB").pool_arguments(source="host")["rounding"]
    2048
    """

    strategy: Strategy = field(default_factory=Dynamic)
    rounding: int | str = GRANULE
    minimum_remainder: int | str = GRANULE
    fit: str = "good"
    source: str | None = None
    source_options: dict = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"strategy must be a vpool.Dynamic, Fixed or Hybrid, not {type(self.strategy).__name__}")
        if isinstance(self.strategy, (Fixed, Hybrid)):
            # Files know one kind of list: whichever was given, policies with the same blocks are equal.
            object.__setattr__(self, "strategy", replace(self.strategy, block=_tuples(self.strategy.block)))
        if too_large := _too_large(self.strategy):
            raise ValueError(too_large[1])
        rounding = parse_size(self.rounding, "rounding")
        if not GRANULE <= rounding <= MAX_ROUNDING or rounding & (rounding - 1):
            raise ValueError(f"rounding must be a power of two from {GRANULE} to 2MiB, got {self.rounding!r}")
        if parse_size(self.minimum_remainder, "minimum_remainder") < GRANULE:
            raise ValueError(f"minimum_remainder must be at least {GRANULE} bytes, got {self.minimum_remainder!r}")
        if self.fit not in _FITS:
            raise ValueError(f"no fit {self.fit!r}; {_instead(self.fit, _FITS)}")
        if not isinstance(self.source_options, dict):
            raise TypeError(f"source_options must be a dict, not {type(self.source_options).__name__}")
        object.__setattr__(self, "source_options", dict(self.source_options))
        if self.source is not None:
            _check_options(self.source, self.source_options)
        elif self.source_options:
            raise ValueError("source_options need a source")

    def pool_arguments(self, device=None, source=None):
        """Keyword arguments of a `Pool` that works by this policy.

        Parameters
        ----------
        device : int, optional
            Ordinal; the thread's current device if not given.
        source : str or vpool.sources.Source, optional
            Instead of the policy's own.

        Returns
        -------
        dict
            ``strategy`` and ``source`` (a `vpool.sources.Source`), and those of ``rounding`` and
            ``minimum_remainder`` that are not a pool's defaults.

        Raises
        ------
        SourceError, ValueError, TypeError
            For a source or a device that cannot be used here.
        """
        arguments = {"strategy": self.strategy, "source": self._made_source(device, source)}
        sizes = {name: parse_size(getattr(self, name)) for name in ("rounding", "minimum_remainder")}
        return arguments | {name: nbytes for name, nbytes in sizes.items() if nbytes != GRANULE}

    def _made_source(self, device, source):
        if source is None and self.source is not None and self.source_options:
            make, options = sources.BY_NAME[self.source], self.source_options
            source = make(device, **options) if "device" in inspect.signature(make).parameters else make(**options)
        return sources.resolve(self.source if source is None else source, device)

    @classmethod
    def of(cls, policy):
        """The policy that a path, a strategy or a policy means."""
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, Strategy):
            return cls(policy)
        if isinstance(policy, (str, os.PathLike)):
            return cls.load(policy)
        raise TypeError(f"a policy must be a path, a vpool.Policy or a strategy, not {type(policy).__name__}")

    @classmethod
    def load(cls, path):
        """Read a policy file.

        Parameters
        ----------
        path : str or os.PathLike
            A TOML file.

        Raises
        ------
        FormatError
            For a file that is no policy: one line that names the file, the key, and what was expected.
        OSError
            For a file that is not there or not readable.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            return cls.loads(_decoded(data))
        except FormatError as reason:
            raise FormatError(f"{os.fspath(path)}: {reason}") from None

    @classmethod
    def loads(cls, text):
        """The policy that a file's text means; FormatError names the key and what was expected."""
        return _policy_of(_parsed(text))

    def save(self, path):
        """Write the policy as a file that `load` reads as an equal one."""
        text = self.dumps()
        with whole_file(path) as file:
            file.write(text.encode())

    def dumps(self):
        """The text of the policy's file.

        Raises
        ------
        TypeError
            For a strategy that is none of vpool's own.
        """
        strategy = {"kind": _kind_of(self.strategy), **_given(self.strategy)}
        dynamic = strategy.pop("dynamic", None)
        tables = {
            "": {"format_version": FORMAT_VERSION}
            | {name: getattr(self, name) for name in ("rounding", "minimum_remainder", "fit")},
            "strategy": strategy,
        }
        if dynamic is not None:
            tables["strategy.dynamic"] = _given(dynamic)
        if self.source is not None:
            tables["source"] = {"name": self.source, **self.source_options}
        return "\n".join(map(_table_text, tables, tables.values()))


# What makes no sense together.


def _too_large(strategy):
    """Key of what is larger than the limit and why, where both are sizes; a share is compared when a pool is made."""
    dynamic = strategy.dynamic if isinstance(strategy, Hybrid) else strategy
    if not isinstance(strategy, (Dynamic, Fixed, Hybrid)) or isinstance(dynamic.limit, float):
        return None
    limit = parse_size(dynamic.limit, "limit")
    for key, whose in (("core", strategy), ("capacity", strategy), ("initial", dynamic)):
        size = parse_size(getattr(whose, key, 0), key)
        # The first segment's default is no particular size: it gives way to the limit.
        if size > limit and getattr(whose, key) != getattr(type(whose), key, None):
            where = "" if whose is strategy else "dynamic."
            return where + key, f"{key} is {format_bytes(size)}, more than the limit ({format_bytes(limit)})"
    return None


def _check_options(name, options):
    if not isinstance(name, str):
        raise TypeError(f"source must be the name of one, not {type(name).__name__}")
    if name not in sources.BY_NAME:
        raise ValueError(f"no source {name!r}; {_instead(name, sources.BY_NAME)}")
    known = _options_of(name)
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"source {name!r} has no option {option!r}; {_instead(option, known)}")
        _value_text(value)
    if name in _ANYWHERE:
        sources.BY_NAME[name](**options)


def _options_of(name):
    return [option for option in inspect.signature(sources.BY_NAME[name]).parameters if option != "device"]


def _instead(word, known):
    """What to write in place of a word that is not known."""
    near = difflib.get_close_matches(str(word), known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"must be one of {', '.join(map(repr, known))}" if known else "it takes none"


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


# Reading.


def _decoded(data):
    try:
        return data.decode()
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        raise FormatError(f"not TOML: not UTF-8 text (at line {line})") from None


def _parsed(text):
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FormatError("not TOML that can be read: nested too deeply") from None
    except ValueError as reason:
        # The parser's message has the line, unless it read all of them.
        message = str(reason).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise FormatError(f"not TOML: {message}") from None


def _policy_of(document):
    _check_version(document)
    _check_keys("", document, _KEYS)
    values = {name: document[name] for name in _KEYS[1:] if name not in ("strategy", "source") and name in document}
    values = {"strategy": _read_strategy(_table("", document, "strategy")), **values}
    if "source" in document:
        values["source"], values["source_options"] = _read_source(_table("", document, "source"))
    return _built(Policy, values, "")


def _check_version(document):
    """Before anything else: a newer file may look different altogether."""
    version = _required("", document, "format_version")
    if type(version) is not int or not 0 < version < 1 << 63:
        raise FormatError(f"format_version: must be an integer of at least 1, such as {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise FormatError(f"format_version: version {version}; this vpool reads up to version {FORMAT_VERSION}")


def _read_strategy(table):
    kind = _word("strategy.", table, "kind")
    if kind not in _KINDS:
        raise FormatError(f"strategy.kind: no strategy {kind!r}; {_instead(kind, _KINDS)}")
    cls = _KINDS[kind]
    names = [one.name for one in fields(cls)]
    _check_keys("strategy.", table, ["kind", *names])
    values = {name: _tuples(table[name]) for name in names if name in table}
    if "dynamic" in values:
        dynamic = _table("strategy.", table, "dynamic")
        _check_keys("strategy.dynamic.", dynamic, [one.name for one in fields(Dynamic)])
        values["dynamic"] = _built(Dynamic, dynamic, "strategy.dynamic.")
    for one in fields(cls):
        if one.default is MISSING and one.default_factory is MISSING:
            _required("strategy.", table, one.name)
    strategy = _built(cls, {name: values[name] for name in names if name in values}, "strategy.")
    if too_large := _too_large(strategy):
        raise FormatError("strategy.{}: {}".format(*too_large))
    return strategy


def _read_source(table):
    name = _word("source.", table, "name")
    if name not in sources.BY_NAME:
        raise FormatError(f"source.name: no source {name!r}; {_instead(name, sources.BY_NAME)}")
    options = {key: value for key, value in table.items() if key not in _KEYS_OF_SOURCE}
    _check_keys("source.", table, [*_KEYS_OF_SOURCE, *_options_of(name)])
    if name in _ANYWHERE:
        _built(sources.BY_NAME[name], options, "source.")
    return name, options


def _required(where, table, name):
    if name not in table:
        raise FormatError(f"{where}{name}: missing")
    return table[name]


def _table(where, parent, name):
    return _of_type(dict, where, parent, name)


def _word(where, table, name):
    return _of_type(str, where, table, name)


def _of_type(wanted, where, table, name):
    value = _required(where, table, name)
    if not isinstance(value, wanted):
        found = _TYPES.get(type(value), "a date or time")
        raise FormatError(f"{where}{name}: must be {_TYPES[wanted]}, not {found}")
    return value


def _check_keys(where, table, known):
    for key in table:
        if key not in known:
            shown = key if key.isprintable() else repr(key)
            raise FormatError(f"{where}{shown}: unknown key; {_instead(key, known)}")


def _built(make, values, where):
    """What `make` makes of values, which are added one by one, so that the one that is wrong can be named."""
    given = {}
    made = make() if not values else None
    for name, value in values.items():
        given[name] = value
        try:
            made = make(**given)
        except (ValueError, TypeError, OverflowError) as reason:
            raise FormatError(f"{where}{name}: {reason}") from None
    return made


# Writing.


def _kind_of(strategy):
    for name, cls in _KINDS.items():
        if type(strategy) is cls:
            return name
    raise TypeError(f"a policy file has no word for a strategy of type {type(strategy).__name__}")


def _given(strategy):
    """A strategy's parameters by name, without those that have no value."""
    values = {one.name: getattr(strategy, one.name) for one in fields(strategy)}
    return {name: value for name, value in values.items() if value is not None}


def _table_text(name, values):
    lines = [f"{key} = {_value_text(value)}\n" for key, value in values.items()]
    return "".join([f"[{name}]\n" if name else "", *lines])


def _value_text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_character_text, value))}"'
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    try:
        return str(operator.index(value))
    except TypeError:
        raise TypeError(f"a policy file has no word for a value of type {type(value).__name__}") from None


def _character_text(character):
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"
