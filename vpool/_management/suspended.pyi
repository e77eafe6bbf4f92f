# Nothing of this module is for Python; compiled modules cimport it.
