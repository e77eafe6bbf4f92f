"""What went wrong, as exceptions that say what to do about it."""
from libc.stdint cimport uint64_t

from vpool._management.areas cimport Areas
from vpool._management.core cimport Core
from vpool._management.state cimport Request


cdef forked(str name)
cdef over_limit(Areas areas, str name, Request* request, measures, debugger)
cdef failure(Areas areas, str name, Request* request, measures, debugger, str verb=*)
cdef not_taken(source, str name, numbers, int status)
cdef stray(Areas areas, str name, uint64_t address, owner)
cdef source_error(Core core, int status, str what)
