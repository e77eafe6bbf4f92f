// What PyTorch calls as its allocator: vpool's functions, with failures as the exceptions that PyTorch wants.
//
// Compiled against the PyTorch that is installed when it is first used, since only that one's c10::OutOfMemoryError becomes
// torch.OutOfMemoryError.  PyTorch does not look at what an allocator returns, so a failure has to be thrown.
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

int (*lend)(std::uint64_t nbytes, int device, std::uint64_t stream, std::uint64_t* address);
void (*take)(std::uint64_t address, int device, std::uint64_t stream);
void (*record)(std::uint64_t address, std::uint64_t stream);
const char* (*failure)();
int (*reset)();
int (*limit)(double fraction, int device);

enum { SERVED = 0, OUT_OF_MEMORY = 1 };

}  // namespace

extern "C" {

void vpool_bind(void* const* functions) {
    lend = reinterpret_cast<decltype(lend)>(functions[0]);
    take = reinterpret_cast<decltype(take)>(functions[1]);
    record = reinterpret_cast<decltype(record)>(functions[2]);
    failure = reinterpret_cast<decltype(failure)>(functions[3]);
    reset = reinterpret_cast<decltype(reset)>(functions[4]);
    limit = reinterpret_cast<decltype(limit)>(functions[5]);
}

void* vpool_alloc(std::size_t nbytes, int device, void* stream) {
    std::uint64_t address = 0;
    int status = lend(nbytes, device, reinterpret_cast<std::uint64_t>(stream), &address);
    if (status == OUT_OF_MEMORY)
        throw c10::OutOfMemoryError({__func__, "vpool", 0}, failure());
    if (status != SERVED) throw std::runtime_error(failure());
    return reinterpret_cast<void*>(address);
}

void vpool_free(void* block, std::size_t, int device, void* stream) {
    take(reinterpret_cast<std::uint64_t>(block), device, reinterpret_cast<std::uint64_t>(stream));
}

void vpool_record_stream(void* block, void* stream) {
    record(reinterpret_cast<std::uint64_t>(block), reinterpret_cast<std::uint64_t>(stream));
}

void vpool_reset() {
    if (reset() != SERVED) throw std::runtime_error("vpool: memory could not be given back; the log says why");
}

void vpool_memory_fraction(double fraction, int device) {
    if (limit(fraction, device) != SERVED)
        throw std::runtime_error("vpool: a pool's limit cannot be that share of the device; the log says why");
}
}
