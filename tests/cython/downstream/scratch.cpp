// Scratch memory for C++ without Python between its uses: an example of a module on top of vpool.
#include <Python.h>
#include <vpool/capi.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>

namespace {

const vpool_capi* vpool = nullptr;

// A block that goes back at the end of its scope, on the stream that it was lent for.
class Scratch {
public:
    Scratch(vpool_pool* pool, vpool_stream* stream, std::uint64_t nbytes, std::uint64_t alignment = 256)
        : pool_(pool), stream_(stream) {
        switch (vpool->allocate_aligned(pool, stream, nbytes, alignment, &address_)) {
        case VPOOL_OK: break;
        case VPOOL_OUT_OF_MEMORY: throw std::bad_alloc();
        case VPOOL_INVALID_VALUE: throw std::invalid_argument("no block has that size or alignment");
        default: throw std::runtime_error("the pool is closed, or another process's");
        }
    }
    Scratch(Scratch&& other) noexcept
        : pool_(other.pool_), stream_(other.stream_), address_(std::exchange(other.address_, 0)) {}
    Scratch(const Scratch&) = delete;
    ~Scratch() { vpool->deallocate(pool_, stream_, address_); }  // 0 does nothing

    std::uint64_t address() const { return address_; }
    bool used_on(vpool_stream* stream) const { return vpool->record_stream(pool_, stream, address_) == VPOOL_OK; }

private:
    vpool_pool* pool_;
    vpool_stream* stream_;
    std::uint64_t address_ = 0;
};

// rounds(pool, stream, nbytes, alignment, repeats): the addresses are multiples; how many rounds there were.
PyObject* rounds(PyObject*, PyObject* args) {
    PyObject *pool_object, *stream_object;
    unsigned long long nbytes, alignment;
    int repeats, done = 0;
    if (!PyArg_ParseTuple(args, "OOKKi", &pool_object, &stream_object, &nbytes, &alignment, &repeats)) return nullptr;
    vpool_pool* pool = vpool->pool_of(pool_object);
    if (pool == nullptr) return nullptr;
    vpool_stream* stream = vpool->stream_of(pool, stream_object);
    if (stream == nullptr) return nullptr;
    const char* error = nullptr;
    bool out_of_memory = false;
    PyThreadState* thread = PyEval_SaveThread();
    try {
        for (; done < repeats && error == nullptr; done++) {
            Scratch first(pool, stream, nbytes, alignment);
            Scratch moved(std::move(first));
            if (moved.address() % alignment) error = "not aligned";
            if (!moved.used_on(stream)) error = "not live";
        }
    } catch (const std::bad_alloc&) {
        out_of_memory = true;
    } catch (const std::exception& other) {
        error = "refused";
    }
    PyEval_RestoreThread(thread);
    if (out_of_memory) return PyErr_NoMemory();
    if (error != nullptr) return PyErr_SetString(PyExc_ValueError, error), nullptr;
    return PyLong_FromLong(done);
}

// newer(): as a module that needs a newer vpool than there is.
PyObject* newer(PyObject*, PyObject*) {
    return vpool_import(VPOOL_CAPI_VERSION + 1) == nullptr ? nullptr : Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"rounds", rounds, METH_VARARGS, nullptr},
    {"newer", newer, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "scratch", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_scratch(void) {
    vpool = vpool_import(VPOOL_CAPI_VERSION);
    return vpool == nullptr ? nullptr : PyModule_Create(&module);
}
