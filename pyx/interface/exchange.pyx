"""Blocks for other libraries: DLPack, and the rules by which a consumer's stream comes after the block's own.

The structures are those of DLPack 1.0, which never change; a capsule of either kind owns one.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from vpool._base.lock cimport atomic_read
from vpool._interface.access cimport Access
from vpool._interface.lender cimport Lender
from vpool._management.order cimport order_is_host
from vpool._management.state cimport Slot

from vpool.errors import SourceError

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define vpool_interpreter_lives() (Py_IsInitialized() && !Py_IsFinalizing())
    #else
    #define vpool_interpreter_lives() (Py_IsInitialized() && !_Py_IsFinalizing())
    #endif
    """
    bint interpreter_lives "vpool_interpreter_lives"() noexcept nogil

cdef enum:
    # DLDeviceType
    ON_HOST = 1
    ON_CUDA = 2
    ON_PINNED = 3
    ON_MANAGED = 13
    UNSIGNED = 1                  # DLDataTypeCode
    FLAG_COPIED = 2               # DLPACK_FLAG_BITMASK_IS_COPIED

cdef struct DLDevice:
    int32_t kind
    int32_t number

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor* self) noexcept nogil

cdef struct DLVersion:
    uint32_t major
    uint32_t minor

cdef struct DLManagedTensorVersioned:
    DLVersion version
    void* context
    void (*deleter)(DLManagedTensorVersioned* self) noexcept nogil
    uint64_t flags
    DLTensor tensor

cdef union Either:
    DLManagedTensor plain
    DLManagedTensorVersioned versioned

cdef struct Export:
    Either managed                # first: what the consumer has is the address of all
    int64_t shape
    int64_t stride
    PyObject* owner

cdef extern from "Python.h":
    ctypedef struct PyObject


cdef void _drop(Export* export) noexcept nogil:
    """The end of an export: on any thread, with or without the GIL, perhaps after the interpreter's."""
    if interpreter_lives():
        with gil:
            Py_DECREF(<object> export.owner)
    free(export)                                  # the owner is left alone where nothing could free it any more


cdef void _delete_plain(DLManagedTensor* tensor) noexcept nogil:
    _drop(<Export*> tensor)


cdef void _delete_versioned(DLManagedTensorVersioned* tensor) noexcept nogil:
    _drop(<Export*> tensor)


cdef void _end_of_capsule(object capsule) noexcept:
    """A consumer renames the capsule that it has taken; one that nobody took is ours."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if PyCapsule_IsValid(capsule, name):
            _drop(<Export*> PyCapsule_GetPointer(capsule, name))


cdef _capsule(owner, uint64_t address, uint64_t nbytes, device, bint versioned, uint64_t flags):
    """A capsule of bytes that `owner` keeps alive."""
    cdef DLTensor* tensor
    cdef const char* name = b"dltensor_versioned" if versioned else b"dltensor"
    cdef Export* export = <Export*> calloc(1, sizeof(Export))
    if export == NULL:
        raise MemoryError
    export.shape = nbytes
    export.stride = 1
    export.owner = <PyObject*> owner
    if versioned:
        export.managed.versioned.version.major = 1
        export.managed.versioned.context = export
        export.managed.versioned.deleter = _delete_versioned
        export.managed.versioned.flags = flags
        tensor = &export.managed.versioned.tensor
    else:
        export.managed.plain.context = export
        export.managed.plain.deleter = _delete_plain
        tensor = &export.managed.plain.tensor
    tensor.data = <void*> address
    tensor.device.kind, tensor.device.number = device
    tensor.ndim = 1
    tensor.dtype.code = UNSIGNED
    tensor.dtype.bits = 8
    tensor.dtype.lanes = 1
    tensor.shape = &export.shape
    tensor.strides = &export.stride
    try:
        capsule = PyCapsule_New(export, name, _end_of_capsule)
    except BaseException:
        free(export)
        raise
    Py_INCREF(owner)
    return capsule


cdef tuple device_of(Lender pool):
    """Type and number of the device, as DLPack has them, that a pool's memory is on."""
    source = pool.core.source
    if not pool.core.source.has_memory:
        raise BufferError(f"source {source.name!r} has addresses without memory")
    if not pool.core.source.host_accessible:
        return ON_CUDA, source.device
    if source.name == "managed":
        return ON_MANAGED, source.device
    return (ON_PINNED, 0) if source.name == "pinned" else (ON_HOST, 0)


cdef bint _graphs_rest(Lender pool, int slot) except -1:
    """Wait for what may use a graph's memory: a launch, on any stream.

    False for other memory, and while something captures.
    """
    if not atomic_read(pool.areas.state.arenas[slot].captured):
        return False
    if pool.streams.captures is not None:
        pool.streams.captures.ask_again()         # nothing else may have asked since the capture ended
    return Access(pool.areas).await_device()


cdef int _follow(Lender pool, int slot, int other, bint named) except -1:
    """Make what a slot does next come after what another has queued."""
    if slot == other:
        return 0
    try:
        ordered = Access(pool.areas).follow(slot, other, named) or _graphs_rest(pool, other)
    except SourceError as error:
        raise BufferError(f"the consumer cannot come after the buffer's stream: {error}") from error
    if not ordered:
        raise BufferError("the consumer cannot come after the buffer's stream while a graph is captured there")
    return 0


cdef int _for_stream(Lender pool, uint64_t address, int slot, stream) except -1:
    """Let a consumer's stream use a block, as it names it: after the block's own, and waited for at its free."""
    cdef int consumer, kept
    cdef uint64_t base
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"a consumer's stream is an int or None, not {type(stream).__name__}")
    if stream == -1:                              # who consumes sees to the order, and to what it does later
        return 0
    if stream == 0 or stream < -1:
        raise ValueError(f"a consumer's stream is 1, 2, a handle or -1, not {stream}: 0 could mean several")
    try:
        consumer = pool.streams.slot_of(stream)
    except SourceError as error:
        raise BufferError(f"the consumer's stream cannot be used: {error}") from error
    if consumer == slot:
        return 0
    _follow(pool, consumer, slot, True)
    base = pool.base_of(address)
    with nogil:
        kept = pool.areas.use_on(base, consumer)
    if kept < 0:
        raise MemoryError("no record left for another stream's use of a block")
    return 0


cdef bint _wants_version(max_version) except -1:
    """Whether a consumer takes the versioned capsule."""
    if max_version is None:
        return False
    try:
        major, _minor = max_version
        return major >= 1
    except (TypeError, ValueError):
        raise TypeError(f"max_version must be two numbers, not {max_version!r}") from None


cdef dlpack(Lender pool, owner, uint64_t address, uint64_t nbytes, int slot, stream, max_version, dl_device, copy):
    """A capsule of a block of a slot, for a consumer.

    `owner` makes what keeps the block alive and in place, and is called when nothing can fail any more.
    """
    cdef bint versioned = _wants_version(max_version)
    device = device_of(pool)
    wanted = device
    if dl_device is not None:
        try:
            kind, number = dl_device
            wanted = (int(kind), int(number))
        except (TypeError, ValueError):
            raise TypeError(f"dl_device must be a type and a number, not {dl_device!r}") from None
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"copy must be True, False or None, not {copy!r}")
    if wanted != device and wanted != (ON_HOST, 0):
        raise BufferError(f"a buffer on device {device} cannot be given to device {wanted}")
    if wanted == (ON_HOST, 0):
        if stream not in (None, -1):
            raise ValueError(f"memory of the host has no stream, so stream must be None, not {stream!r}")
        if copy or not pool.core.source.host_accessible:
            if copy is False:
                raise BufferError("memory of a GPU can be given to the host only as a copy")
            content = _copied(pool, address, nbytes, slot)
            return _capsule(
                content, <uint64_t> PyBytes_AS_STRING(content), nbytes, wanted, versioned, FLAG_COPIED)
    elif copy:
        raise BufferError("a buffer cannot copy itself on its device: copy what you make of it")
    if nbytes and wanted[0] != ON_CUDA and stream is None:
        for_host(pool, slot)
    elif nbytes and wanted[0] != ON_HOST:
        _for_stream(pool, address, slot, 1 if stream is None else stream)
    return _capsule(owner(), address, nbytes, wanted, versioned, 0)


cdef int for_host(Lender pool, int slot) except -1:
    """Wait for what a slot has queued: the host uses a block of it next."""
    if pool.core.source.name != "host" and not order_is_host(&pool.areas.state.table[slot]):
        _follow(pool, pool.streams.host_slot(), slot, False)
    return 0


cdef bytes _copied(Lender pool, uint64_t address, uint64_t nbytes, int slot):
    """The bytes of a block, once what its stream has queued is complete."""
    if nbytes == 0:
        return b""
    access = Access(pool.areas)
    try:
        if access.may(slot, False) or _graphs_rest(pool, slot):
            return access.read(slot, False, address, nbytes)
    except SourceError as error:
        raise BufferError(f"the buffer cannot be copied to the host: {error}") from error
    raise BufferError("a buffer cannot be copied to the host while a graph is captured")


cdef dict array_interface(Lender pool, uint64_t address, uint64_t nbytes, int slot):
    """What ``__cuda_array_interface__`` is for a block.

    A consumer hands the stream's number to the driver, which crashes on that of a destroyed stream.  So one that is
    only known by its number, or gone, is waited for here, and not named.
    """
    cdef Slot* its = &pool.areas.state.table[slot]
    cdef uint64_t handle = atomic_read(its.stream)
    stream = None
    if slot == 0:
        stream = 1                                # the legacy default stream, as the interface spells it
    elif nbytes and not order_is_host(its):
        if its.thread == 0 and atomic_read(its.held) > 0 and not atomic_read(its.gone):
            stream = handle
        else:
            _follow(pool, pool.streams.host_slot(), slot, False)
    return {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address if nbytes else 0, False),
        "version": 3,
        "strides": None,
        "stream": stream,
    }
