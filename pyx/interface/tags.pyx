"""Tags: names for what blocks are for, as small integers below."""
import threading

from vpool._management.journal cimport (
    OTHER_TAGS,
    journal_set_tag,
    journal_tag,
    journal_use_tags,
)

from vpool._storage.fork import PerProcess

TOO_MANY_TAGS = "one of too many tags to tell apart"

# By number; 0 is no tag.  A number is never given up: blocks that live for long have it.
_names = [None]
_numbers = {None: 0}
_naming = PerProcess(threading.RLock)
_entered = threading.local()
# Called when this process meets its first tag.
first_use = []


class tag:
    """Attribute what the calling thread allocates within a ``with`` block.

    Tags nest, and the innermost one counts.  Another thread has none until it enters one itself: pass it
    `tag.current`.

    Parameters
    ----------
    name : str or None
        What the blocks are for; None is no tag, also within another one.

    Raises
    ------
    TypeError, ValueError
        For what is no name.

    Notes
    -----
    From the first tag of a process on, every call to any of its pools looks for the thread's tag.  65,534 names
    are told apart; those that come later share one row in reports.

    Examples
    --------
    >>> import vpool
    >>> pool = vpool.Pool(source="host")
    >>> with vpool.tag("weights"):
    ...     buffer = pool.empty(1000)
    >>> [(row["tag"], row["live_bytes"]) for row in pool.inspect().tags]
    [('weights', 1024)]
    """

    def __init__(self, name):
        self.name = checked_tag(name)

    def __repr__(self):
        return f"vpool.tag({self.name!r})"

    def __enter__(self):
        number = number_of(self.name)
        _entered.__dict__.setdefault("stack", []).append(journal_tag())
        journal_set_tag(number)
        return self

    def __exit__(self, *exc_info):
        stack = getattr(_entered, "stack", ())
        if not stack:
            raise RuntimeError("vpool.tag: this block was entered on another thread, whose blocks it still names")
        journal_set_tag(stack.pop())

    @staticmethod
    def current():
        """Name of the calling thread's innermost tag, or None."""
        return name_of(journal_tag())


class default_tag(tag):
    """The same, where the calling thread has no tag: one that the program gave counts."""

    def __enter__(self):
        number = number_of(self.name)
        _entered.__dict__.setdefault("stack", []).append(enter_tag(number))
        return self


def checked_tag(name):
    """A tag's name, if it is one."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a tag is named by a string, not {type(name).__name__}")
    if name == "":
        raise ValueError("a tag must have a name; None is no tag")
    return name


def name_of(number):
    """What a block's number means: a name, or None."""
    return _names[number] if number < len(_names) else TOO_MANY_TAGS


def number_of(name):
    """The number of a tag, given on first use."""
    number = _numbers.get(name)
    if number is not None:
        return number
    with _naming.here:
        if len(_names) == 1:
            journal_use_tags()
            for call in first_use:
                call()
        # Only now: a finaliser that ran meanwhile may have named this tag, or others.
        number = _numbers.get(name)
        if number is None:
            if len(_names) >= OTHER_TAGS:
                return <int> OTHER_TAGS
            number = len(_names)
            _names.append(name)
            _numbers[name] = number
    return number
