// Calls what PyTorch would call, and tells what it threw.
#include <c10/util/Exception.h>

#include <cstring>

extern "C" int catch_alloc(void* function, std::size_t nbytes, int device, void* stream, void** block, char* text) {
    text[0] = 0;
    try {
        *block = reinterpret_cast<void* (*)(std::size_t, int, void*)>(function)(nbytes, device, stream);
        return 0;
    } catch (const c10::OutOfMemoryError& error) {
        std::strncpy(text, error.what(), 8191);
        return 1;
    } catch (const std::exception& error) {
        std::strncpy(text, error.what(), 8191);
        return 2;
    }
}

extern "C" int catch_limit(void* function, double fraction, int device) {
    try {
        reinterpret_cast<void (*)(double, int)>(function)(fraction, device);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}
