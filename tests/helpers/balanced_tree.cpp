// An allocator as many are: best fit in a std::set, which is a red-black tree, with a record for each block, a hash
// table of live ones, and merging.  No lock, no streams, no counters.  The loop is that of `random_toggles`.
#include <chrono>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>
using u64 = std::uint64_t;

struct Block { u64 address, nbytes; Block *before, *after; bool free; };
struct Smaller {
    bool operator()(const Block* a, const Block* b) const {
        return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->address < b->address;
    }
};
struct Allocator {
    std::set<Block*, Smaller> free;
    std::unordered_map<u64, Block*> live;
    Allocator() { free.insert(new Block{256, (u64) 1 << 40, nullptr, nullptr, true}); }

    u64 allocate(u64 nbytes) {
        Block wanted{0, (nbytes + 255) / 256 * 256, nullptr, nullptr, true};
        auto found = free.lower_bound(&wanted);
        Block* block = *found;
        free.erase(found);
        if (block->nbytes > wanted.nbytes) {
            Block* rest = new Block{block->address + wanted.nbytes, block->nbytes - wanted.nbytes, block,
                                    block->after, true};
            if (rest->after) rest->after->before = rest;
            block->after = rest;
            block->nbytes = wanted.nbytes;
            free.insert(rest);
        }
        block->free = false;
        live.emplace(block->address, block);
        return block->address;
    }

    // Make `left` what it and its neighbour were.
    Block* merge(Block* left, Block* right) {
        left->nbytes += right->nbytes;
        left->after = right->after;
        if (left->after) left->after->before = left;
        delete right;
        return left;
    }

    void deallocate(u64 address) {
        auto found = live.find(address);
        Block* block = found->second;
        live.erase(found);
        if (block->before && block->before->free) {
            free.erase(block->before);
            block = merge(block->before, block);
        }
        if (block->after && block->after->free) {
            free.erase(block->after);
            block = merge(block, block->after);
        }
        block->free = true;
        free.insert(block);
    }
};

extern "C" u64 toggles(const u64* holes, const u64* order, u64 count, const u64* sizes, u64 mask, u64 few,
                       u64 operations, u64 seed) {
    Allocator pool;
    std::vector<u64> blocks(count), slots(2 * few);
    for (u64 i = 0; i < count; ++i) { blocks[i] = pool.allocate(holes[i]); pool.allocate(256); }
    for (u64 i = 0; i < count; ++i) pool.deallocate(blocks[order[i]]);
    for (u64 i = 0; i < few; ++i) slots[2 * i] = pool.allocate(sizes[i & mask]);
    u64 state = seed * 2 + 1;
    auto started = std::chrono::steady_clock::now();
    for (u64 i = 0; i < operations + operations / 2; ++i) {
        if (i == operations / 2) started = std::chrono::steady_clock::now();
        state = state * 6364136223846793005u + 1442695040888963407u;
        u64 slot = ((state >> 32) * (2 * few)) >> 32;
        if (slots[slot]) { pool.deallocate(slots[slot]); slots[slot] = 0; }
        else slots[slot] = pool.allocate(sizes[(state >> 11) & mask]);
    }
    auto done = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(done - started).count();
}
