"""Something to be done right after a package is imported, whoever imports it, and not before."""

import functools
import importlib.abc
import sys

__all__ = ["after_import"]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a package as the other finders do, and has a function called once its code was executed."""

    def __init__(self, name, function):
        self._name = name
        self._function = function

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader):
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # of a folder without code
            return

        @functools.wraps(execute)
        def execute_and_call(module):
            execute(module)
            if self in sys.meta_path:  # else it was called, or nobody waits for it any more
                sys.meta_path.remove(self)
                self._function(module)

        loader.exec_module = execute_and_call  # of this loader alone: each module has its own


def after_import(name, function):
    """Call a function with a module once its code was executed; at once where that is done already.

    Parameters
    ----------
    name : str
        Of the module, in full.
    function : callable
        What it raises fails the import.

    Returns
    -------
    callable
        Takes the wish back.

    Notes
    -----
    A module whose import fails is waited for again.  Who imports it sees its own spec and loader.
    """
    module = sys.modules.get(name)
    if module is not None:
        function(module)
        return lambda: None
    finder = _Finder(name, function)
    sys.meta_path.insert(0, finder)

    def forget():
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return forget
