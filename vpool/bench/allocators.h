// The allocators that peer.cpp runs its workloads over: the C library's malloc always, CUDA's own with WITH_CUDA, RMM's
// and PyTorch's with WITH_RMM and WITH_TORCH.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef WITH_RMM
#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#endif
#ifdef WITH_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace {

#ifdef WITH_CUDA
using Stream = cudaStream_t;

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

void begin_thread() { check(cudaSetDevice(0), "cudaSetDevice"); }

std::vector<Stream> made_streams;

Stream new_stream() {
  Stream stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  made_streams.push_back(stream);
  return stream;
}

void end_streams() {  // once the allocator that knows them is gone
  cudaDeviceSynchronize();
  for (Stream stream : made_streams) cudaStreamDestroy(stream);
  made_streams.clear();
}
#else
using Stream = void*;

void begin_thread() {}
Stream new_stream() { return nullptr; }
void end_streams() {}
#endif

struct Peer {
  virtual ~Peer() = default;
  virtual void* allocate(size_t bytes, Stream stream) = 0;
  virtual void deallocate(void* block, size_t bytes, Stream stream) = 0;
  virtual size_t reserved() { return 0; }  // bytes, the most so far where it tells that; 0 where it tells nothing
};

struct Malloc : Peer {
  void* allocate(size_t bytes, Stream) override {
    void* block = std::malloc(bytes);
    if (!block) throw std::bad_alloc();
    return block;
  }
  void deallocate(void* block, size_t, Stream) override { std::free(block); }
};

#ifdef WITH_CUDA
struct CudaMalloc : Peer {
  void* allocate(size_t bytes, Stream) override {
    void* block = nullptr;
    check(cudaMalloc(&block, bytes), "cudaMalloc");
    return block;
  }
  void deallocate(void* block, size_t, Stream) override { check(cudaFree(block), "cudaFree"); }
};

class CudaMallocAsync : public Peer {
 public:
  CudaMallocAsync() {
    check(cudaDeviceGetDefaultMemPool(&pool_, 0), "cudaDeviceGetDefaultMemPool");
    uint64_t keep = UINT64_MAX, none = 0;
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &none), "cudaMemPoolSetAttribute");
  }
  ~CudaMallocAsync() override {
    cudaDeviceSynchronize();
    cudaMemPoolTrimTo(pool_, 0);
  }
  void* allocate(size_t bytes, Stream stream) override {
    void* block = nullptr;
    check(cudaMallocAsync(&block, bytes, stream), "cudaMallocAsync");
    return block;
  }
  void deallocate(void* block, size_t, Stream stream) override { check(cudaFreeAsync(block, stream), "cudaFreeAsync"); }
  size_t reserved() override {
    uint64_t bytes = 0;
    cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &bytes);
    return bytes;
  }

 private:
  cudaMemPool_t pool_ = nullptr;
};
#endif

#ifdef WITH_RMM
constexpr size_t RMM_INITIAL = size_t{256} << 20;
constexpr size_t RMM_ALIGNMENT = 256;

template <class Resource>
class Rmm : public Peer {
 public:
  template <class... Arguments>
  explicit Rmm(Arguments&&... arguments) : resource_(std::forward<Arguments>(arguments)...) {}
  void* allocate(size_t bytes, Stream stream) override {
    return resource_.allocate(rmm::cuda_stream_view{stream}, bytes, RMM_ALIGNMENT);
  }
  void deallocate(void* block, size_t bytes, Stream stream) override {
    resource_.deallocate(rmm::cuda_stream_view{stream}, block, bytes, RMM_ALIGNMENT);
  }
  size_t reserved() override {
    if constexpr (requires { resource_.pool_size(); }) return resource_.pool_size();
    return 0;
  }

 private:
  Resource resource_;
};
#endif

#ifdef WITH_TORCH
namespace caching = c10::cuda::CUDACachingAllocator;

class Torch : public Peer {
 public:
  Torch() {
    static const bool begun = (caching::init(1), true);
    (void)begun;
    caching::emptyCache();
    caching::resetPeakStats(0);
  }
  ~Torch() override { caching::emptyCache(); }
  void* allocate(size_t bytes, Stream stream) override { return caching::raw_alloc_with_stream(bytes, stream); }
  void deallocate(void* block, size_t, Stream) override { caching::raw_delete(block); }
  size_t reserved() override { return caching::getDeviceStats(0).reserved_bytes[0].peak; }
};
#endif

std::unique_ptr<Peer> make(const std::string& name) {
  if (name == "malloc") return std::make_unique<Malloc>();
#ifdef WITH_CUDA
  if (name == "cudaMalloc") return std::make_unique<CudaMalloc>();
  if (name == "cudaMallocAsync") return std::make_unique<CudaMallocAsync>();
#endif
#ifdef WITH_RMM
  namespace mr = rmm::mr;
  if (name == "rmm_pool")
    return std::make_unique<Rmm<mr::pool_memory_resource>>(mr::cuda_memory_resource{}, RMM_INITIAL);
  if (name == "rmm_arena") return std::make_unique<Rmm<mr::arena_memory_resource>>(mr::cuda_memory_resource{});
  if (name == "rmm_binning")  // bins from 256 KiB to 4 MiB, and a pool for the rest
    return std::make_unique<Rmm<mr::binning_memory_resource>>(
        mr::pool_memory_resource(mr::cuda_memory_resource{}, RMM_INITIAL), int8_t{18}, int8_t{22});
  if (name == "rmm_async") return std::make_unique<Rmm<mr::cuda_async_memory_resource>>();
#endif
#ifdef WITH_TORCH
  if (name == "torch") return std::make_unique<Torch>();
#endif
  throw std::runtime_error("no allocator " + name + " is compiled in");
}

}  // namespace
