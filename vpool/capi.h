/* vpool for C and C++: a table of functions that an extension module gets at run time, so that it links with nothing.

   #include <Python.h>
   #include <vpool/capi.h>        (the folder is vpool.get_include())

   static const vpool_capi *vpool;
   ...in the module's init function:    vpool = vpool_import(VPOOL_CAPI_VERSION);  if (vpool == NULL) return NULL;

   Functions are only ever added, at the end of the table, and its version counts that: a module that was built with an
   older header runs with every newer vpool.

   CUDA's headers are not needed.  An address is a number. */
#ifndef VPOOL_CAPI_H
#define VPOOL_CAPI_H

#include <Python.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VPOOL_CAPI_VERSION 1

/* What a function returns.  After anything but VPOOL_OK nothing has changed. */
enum {
    VPOOL_OK = 0,
    VPOOL_INVALID_VALUE = 1,    /* 2^63 bytes or more, or an alignment that is no power of two of at most 2 MiB */
    VPOOL_OUT_OF_MEMORY = 2,
    VPOOL_INVALID_POINTER = 3,  /* no live block of this pool */
    VPOOL_CLOSED = 4,
    VPOOL_FORKED = 5            /* the pool is the parent process's */
};

/* A vpool.Pool.  Whoever uses one keeps a reference to the Python object that it was got from. */
typedef struct vpool_pool vpool_pool;
/* A stream as one pool knows it: of that pool alone, and as long as that. */
typedef struct vpool_stream vpool_stream;

typedef struct vpool_capi {
    uint32_t version;
    uint32_t nbytes; /* of this table */

    /* With the GIL. */

    /* The pool that a Python object is; NULL with TypeError for another object. */
    vpool_pool *(*pool_of)(PyObject *pool);
    /* A stream of a pool: None for the thread's default one, a handle as an int, or an object that has one.  NULL with an
       exception.  Ask again when a capture begins on it or ends, and after Pool.forget_stream. */
    vpool_stream *(*stream_of)(vpool_pool *pool, PyObject *stream);

    /* Without the GIL, from any thread.  Callbacks for pressure and a garbage collection, which need Python, are not
       tried.  A pool with debug modes takes the GIL itself. */

    /* Lend a block of at least `nbytes`; 0 bytes give address 0. */
    int (*allocate)(vpool_pool *pool, vpool_stream *stream, uint64_t nbytes, uint64_t *address);
    /* The same at a multiple of `alignment`.  Every block is at one of 256. */
    int (*allocate_aligned)(vpool_pool *pool, vpool_stream *stream, uint64_t nbytes, uint64_t alignment,
                            uint64_t *address);
    /* Take a block back on its own stream, which is looked for first in `stream`'s blocks. */
    int (*deallocate)(vpool_pool *pool, vpool_stream *stream, uint64_t address);
    /* Take a block back that `stream` used last. */
    int (*deallocate_on)(vpool_pool *pool, vpool_stream *stream, uint64_t address);
    /* Tell that `stream` uses a block too. */
    int (*record_stream)(vpool_pool *pool, vpool_stream *stream, uint64_t address);
} vpool_capi;

/* The table of the installed vpool; NULL with ImportError where it is older than `least`.  With the GIL. */
static inline const vpool_capi *vpool_import(uint32_t least) {
    const vpool_capi *table = (const vpool_capi *) PyCapsule_Import("vpool.capi", 0);
    if (table != NULL && table->version < least) {
        PyErr_Format(PyExc_ImportError, "vpool.capi has version %u, and this module needs %u: install a newer vpool",
                     (unsigned) table->version, (unsigned) least);
        return NULL;
    }
    return table;
}

#ifdef __cplusplus
}
#endif
#endif
