// The workloads of `vpool bench` over the compiled allocators of others.
//
// Usage: peer NAME.  Each line of standard input is a workload with its numbers; the answer is one line of JSON,
// with the figures that vpool's own loops (vpool/_interface/bench) give for the same workload, or an error.
#include <sched.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocators.h"

namespace {

// Time and answers.

using Clock = std::chrono::steady_clock;
using Moment = Clock::time_point;

double nanoseconds(Moment begin, Moment end) { return std::chrono::duration<double, std::nano>(end - begin).count(); }

class Answer {
 public:
  Answer& add(const char* name, double value) {
    char number[32];
    std::snprintf(number, sizeof number, "%.12g", value);
    text_ += (text_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + number;
    return *this;
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

Answer percentiles(std::vector<double>& each, double elapsed) {
  std::sort(each.begin(), each.end());
  auto at = [&](double share) { return each[std::min(each.size() - 1, size_t(share * double(each.size())))]; };
  return Answer().add("elapsed", elapsed).add("p50_ns", at(0.5)).add("p99_ns", at(0.99)).add("p999_ns", at(0.999));
}

// Workloads.

struct Block {
  void* at = nullptr;
  size_t bytes = 0;
};

class Owned {  // blocks that go back at the end, whatever happens
 public:
  Owned(Peer& peer, Stream stream, size_t count) : blocks(count), peer_(peer), stream_(stream) {}
  ~Owned() {
    for (size_t i = 0; i < blocks.size(); ++i) drop(i);
  }
  void fill(size_t i, size_t bytes) { blocks[i] = {peer_.allocate(bytes, stream_), bytes}; }
  void drop(size_t i) {
    if (!blocks[i].at) return;
    peer_.deallocate(blocks[i].at, blocks[i].bytes, stream_);
    blocks[i].at = nullptr;
  }
  std::vector<Block> blocks;

 private:
  Peer& peer_;
  Stream stream_;
};

void pairs(Peer& peer, size_t bytes, size_t count, Stream stream) {
  for (size_t i = 0; i < count; ++i) peer.deallocate(peer.allocate(bytes, stream), bytes, stream);
}

// A free of a random one of the live blocks, and an allocation of a random size in its place.
class Replacements {
 public:
  Replacements(Peer& peer, size_t live, unsigned seed, Stream stream)
      : owned_(peer, stream, live), sizes_(DRAWS), where_(DRAWS) {
    std::mt19937_64 draw(seed);
    std::uniform_real_distribution<double> logarithm(std::log(512.0), std::log(16777216.0));
    for (auto& size : sizes_) size = size_t(std::exp(logarithm(draw)));
    for (auto& slot : where_) slot = draw() % live;
    for (size_t i = 0; i < live; ++i) owned_.fill(i, sizes_[i & (DRAWS - 1)]);
  }
  void run(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      ++done_;
      size_t slot = where_[(done_ * 7) & (DRAWS - 1)];
      owned_.drop(slot);
      owned_.fill(slot, sizes_[done_ & (DRAWS - 1)]);
    }
  }

 private:
  static constexpr size_t DRAWS = 1 << 16;
  Owned owned_;
  std::vector<size_t> sizes_, where_;
  size_t done_ = 0;
};

constexpr size_t PARTS = 9;  // as in vpool/bench/calls.py

size_t warming(size_t count) { return std::min<size_t>(20000, count / 2); }

// So many operations in parts: the median part counts, since another program may have run in one.
Answer in_parts(size_t count, const std::function<void(size_t)>& run) {
  const size_t part = std::max<size_t>(1, count / PARTS);
  std::vector<double> each;
  for (size_t i = 0; i < PARTS; ++i) {
    Moment begin = Clock::now();
    run(part);
    each.push_back(nanoseconds(begin, Clock::now()));
  }
  double elapsed = std::accumulate(each.begin(), each.end(), 0.0);
  std::sort(each.begin(), each.end());
  return Answer().add("elapsed", elapsed).add("ns", each[PARTS / 2] / double(part));
}

Answer timed_pairs(Peer& peer, size_t bytes, size_t count, Stream stream) {
  pairs(peer, bytes, count / 10 + 1, stream);
  return in_parts(count, [&](size_t part) { pairs(peer, bytes, part, stream); });
}

Answer pair(Peer& peer, size_t bytes, size_t neighbours, size_t count) {
  Stream stream = new_stream();
  Owned owned(peer, stream, neighbours ? 2 * neighbours + 1 : 0);
  for (size_t i = 0; i < owned.blocks.size(); ++i) owned.fill(i, 4096);
  for (size_t i = 1; i < owned.blocks.size(); i += 2) owned.drop(i);
  return timed_pairs(peer, bytes, count, stream);
}

Answer random(Peer& peer, size_t live, size_t count) {
  Stream stream = new_stream();
  Replacements replacements(peer, live, 17, stream);
  replacements.run(warming(count));
  return in_parts(count, [&](size_t part) { replacements.run(part); });
}

Answer latency(size_t count, const std::function<void()>& operation) {
  std::vector<double> each(count);
  for (size_t i = 0; i < count / 10; ++i) operation();
  Moment begin = Clock::now(), before = begin;
  for (auto& one : each) {
    operation();
    Moment now = Clock::now();
    one = nanoseconds(before, now);
    before = now;
  }
  return percentiles(each, nanoseconds(begin, before));
}

Answer latency_pair(Peer& peer, size_t bytes, size_t count) {
  Stream stream = new_stream();
  return latency(count, [&] { pairs(peer, bytes, 1, stream); });
}

Answer latency_random(Peer& peer, size_t live, size_t count) {
  Stream stream = new_stream();
  Replacements replacements(peer, live, 17, stream);
  return latency(count, [&] { replacements.run(1); });
}

// Threads that begin at once; an error of one of them is thrown when all have ended.
class Crew {
 public:
  explicit Crew(size_t threads) : size_(threads), spans_(threads) {}
  void add(std::function<std::pair<Moment, Moment>(std::function<void()>)> work) {
    size_t number = threads_.size();
    threads_.emplace_back([this, number, work] {
      try {
        begin_thread();
        spans_[number] = work([this] { arrive(); });
      } catch (...) {
        if (!failed_.test_and_set()) error_ = std::current_exception();
        arrived_ += size_;  // nobody waits for this one
      }
    });
  }
  Answer finish(size_t operations_each, size_t operations) {
    for (auto& thread : threads_) thread.join();
    if (error_) std::rethrow_exception(error_);
    std::vector<double> each;
    Moment first = spans_[0].first, last = spans_[0].second;
    for (auto& [begin, end] : spans_) {
      each.push_back(nanoseconds(begin, end));
      first = std::min(first, begin);
      last = std::max(last, end);
    }
    std::sort(each.begin(), each.end());
    double wall = nanoseconds(first, last);
    return Answer()
        .add("elapsed", wall)
        .add("ns", each[each.size() / 2] / double(operations_each))
        .add("per_us", double(operations) / wall * 1000.0);
  }

 private:
  void arrive() {
    ++arrived_;
    while (arrived_ < size_) sched_yield();
  }
  size_t size_;
  std::atomic<size_t> arrived_{0};
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
  std::vector<std::pair<Moment, Moment>> spans_;
  std::vector<std::thread> threads_;
};

Answer threads(Peer& peer, bool same_stream, bool random_sizes, size_t number, size_t parameter, size_t count) {
  std::vector<Stream> streams;
  for (size_t i = 0; i < (same_stream ? 1 : number); ++i) streams.push_back(new_stream());
  Crew crew(number);
  for (size_t i = 0; i < number; ++i) {
    Stream stream = streams[same_stream ? 0 : i];
    crew.add([&, i, stream](const std::function<void()>& arrive) {
      std::unique_ptr<Replacements> replacements;
      if (random_sizes) replacements = std::make_unique<Replacements>(peer, parameter, unsigned(17 + i), stream);
      auto run = [&](size_t repeats) {
        random_sizes ? replacements->run(repeats) : pairs(peer, parameter, repeats, stream);
      };
      run(warming(count));
      arrive();
      Moment begin = Clock::now();
      run(count);
      return std::pair{begin, Clock::now()};
    });
  }
  return crew.finish(count, count * number);
}

// Addresses on their way from the thread that allocates to the one that frees.
class Channel {
 public:
  void put(void* block) {
    while (written_.load(std::memory_order_relaxed) - read_.load(std::memory_order_acquire) == PLACES) sched_yield();
    places_[written_ % PLACES] = block;
    written_.fetch_add(1, std::memory_order_release);
  }
  void* take() {
    while (read_.load(std::memory_order_relaxed) == written_.load(std::memory_order_acquire)) sched_yield();
    void* block = places_[read_ % PLACES];
    read_.fetch_add(1, std::memory_order_release);
    return block;
  }

 private:
  static constexpr size_t PLACES = 1024;
  alignas(64) std::atomic<size_t> written_{0};
  alignas(64) std::atomic<size_t> read_{0};
  alignas(64) void* places_[PLACES];
};

Answer handoff(Peer& peer, size_t bytes, size_t couples, size_t count) {
  std::vector<Channel> channels(couples);
  Crew crew(2 * couples);
  for (Channel& channel : channels) {
    Stream stream = new_stream();
    crew.add([&, stream](const std::function<void()>& arrive) {
      arrive();
      Moment begin = Clock::now();
      size_t sent = 0;
      try {
        for (; sent < count; ++sent) channel.put(peer.allocate(bytes, stream));
      } catch (...) {
        for (; sent < count; ++sent) channel.put(nullptr);  // the other thread waits for them
        throw;
      }
      return std::pair{begin, Clock::now()};
    });
    crew.add([&, stream](const std::function<void()>& arrive) {
      arrive();
      Moment begin = Clock::now();
      for (size_t i = 0; i < count; ++i) {
        void* block = channel.take();
        if (block) peer.deallocate(block, bytes, stream);
      }
      return std::pair{begin, Clock::now()};
    });
  }
  return crew.finish(count, count * couples);
}

Answer miss(Peer& peer, size_t bytes, size_t count) {
  Stream stream = new_stream();
  Owned owned(peer, stream, count);
  auto fill = [&] {
    Moment begin = Clock::now();
    for (size_t i = 0; i < count; ++i) owned.fill(i, bytes);
    return nanoseconds(begin, Clock::now());
  };
  double first = fill();
  for (size_t i = 0; i < count; ++i) owned.drop(i);
  double again = fill();
  const double each = 1.0 / double(count);
  return Answer().add("elapsed", first + again).add("miss_ns", first * each).add("hit_ns", again * each);
}

Answer blocks(Peer& peer, size_t bytes, size_t live, size_t count) {
  Stream stream = new_stream();
  Owned owned(peer, stream, live);
  for (size_t i = 0; i < live; ++i) owned.fill(i, bytes);
  return timed_pairs(peer, bytes, count, stream);
}

struct Event {
  uint32_t is_free, number;
  uint64_t bytes, stream;
};

Answer trace(Peer& peer, const std::string& path, size_t passes) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> raw((std::istreambuf_iterator<char>(file)), {});
  const Event* events = reinterpret_cast<const Event*>(raw.data());
  size_t count = raw.size() / sizeof(Event), numbers = 0, stream_count = 1;
  if (!count) throw std::runtime_error("no events in " + path);
  for (size_t i = 0; i < count; ++i) {
    numbers = std::max<size_t>(numbers, events[i].number + 1);
    stream_count = std::max<size_t>(stream_count, events[i].stream + 1);
  }
  std::vector<Stream> streams;
  for (size_t i = 0; i < stream_count; ++i) streams.push_back(new_stream());
  struct Live : Block {
    Stream stream;
  };
  std::vector<Live> live(numbers);
  auto drop = [&](Live& one) {
    if (one.at) peer.deallocate(one.at, one.bytes, one.stream);
    one.at = nullptr;
  };
  double total = 0, cold = 0, warm = 0;
  std::exception_ptr error;
  try {
    for (size_t pass = 0; pass < passes; ++pass) {
      Moment begin = Clock::now();
      for (size_t i = 0; i < count; ++i) {
        Live& one = live[events[i].number];
        if (events[i].is_free) {
          drop(one);
        } else if (events[i].bytes) {
          one.stream = streams[events[i].stream];
          one.bytes = events[i].bytes;
          one.at = peer.allocate(one.bytes, one.stream);
        }
      }
      warm = nanoseconds(begin, Clock::now());
      total += warm;
      if (pass == 0) cold = warm;
      for (Live& one : live) drop(one);
    }
  } catch (...) {
    error = std::current_exception();
    for (Live& one : live) drop(one);
  }
  size_t reserved = peer.reserved();
  if (error) std::rethrow_exception(error);
  const double each = 1.0 / double(count);
  Answer answer = Answer().add("elapsed", total).add("cold_ns", cold * each).add("warm_ns", warm * each);
  return reserved ? answer.add("reserved_bytes", double(reserved)) : answer;
}

Answer answer_to(Peer& peer, const std::string& line) {
  std::istringstream words(line);
  std::string workload, path;
  words >> workload;
  if (workload == "trace") {
    size_t passes = 3;
    words >> passes >> std::ws;
    std::getline(words, path);
    return trace(peer, path, passes);
  }
  size_t a = 0, b = 0, c = 0;
  words >> a >> b;
  if (a == 0 || (b == 0 && workload != "pair")) throw std::runtime_error("not a workload: " + line);
  if (workload == "random") return random(peer, a, b);
  if (workload == "latency_pair") return latency_pair(peer, a, b);
  if (workload == "latency_random") return latency_random(peer, a, b);
  if (workload == "miss") return miss(peer, a, b);
  words >> c;
  if (c == 0) throw std::runtime_error("not a workload: " + line);
  if (workload == "pair") return pair(peer, a, b, c);
  if (workload == "handoff") return handoff(peer, a, b, c);
  for (bool one : {false, true})
    for (bool random_sizes : {false, true})
      if (workload == std::string(one ? "one" : "own") + (random_sizes ? "_random" : "_same"))
        return threads(peer, one, random_sizes, b, a, c);
  if (workload == "blocks") return blocks(peer, a, b, c);
  throw std::runtime_error("not a workload: " + line);
}

void say_error(std::string text) {
  for (char& one : text)
    if (one == '"' || one == '\\' || one < ' ') one = ' ';
  std::cout << "{\"error\": \"" << text << "\"}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  try {
#ifdef WITH_CUDA
    begin_thread();
    check(cudaFree(nullptr), "cudaFree");
#endif
    make(name);
    std::cout << "{\"ready\": 1}" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::unique_ptr<Peer> peer = make(name);
        Answer answer = answer_to(*peer, line);
        std::cout << answer.text() << std::endl;
      } catch (const std::exception& error) {
        say_error(error.what());
      }
      end_streams();
    }
  } catch (const std::exception& error) {
    say_error(error.what());
    std::_Exit(1);
  }
  std::_Exit(0);  // the libraries' own endings have nothing to do with what was measured
}
