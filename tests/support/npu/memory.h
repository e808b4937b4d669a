// Memory of the devices: the host's, which is reused in the order of a stream, as on a device.
//
// What is freed is overwritten by 0xFF, not at once but by the stream that it was made on, when that
// has done what was launched before. Who still reads it on another stream, without record_stream()
// or an event, reads NaN. What is new is NaN as well.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace npu {

struct Block {
  void* data;
  size_t size;
  int device;
  Line* line;
  std::vector<Line*> used_on;
};

class Memory final : public c10::Allocator {
 public:
  struct Sizes {
    int64_t now = 0, peak = 0;
  };

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device place(kType, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &release, place};
    auto* block = take(nbytes, current_device);
    return {block->data, block, &release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // a pointer alone does not say which stream it belongs to
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    drain_device(current_device);
    std::memcpy(to, from, count);
  }

  void used_on(const c10::DataPtr& data, Line* line) {
    if (!data.get()) return;
    TORCH_CHECK(data.get_deleter() == &release, "npu: record_stream() of memory of another device");
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> hold(mutex_);
    if (line != block->line) block->used_on.push_back(line);
  }

  Sizes sizes(int device) {
    std::lock_guard<std::mutex> hold(mutex_);
    return sizes_[device];
  }
  void reset_peak(int device) {
    std::lock_guard<std::mutex> hold(mutex_);
    sizes_[device].peak = sizes_[device].now;
  }

 private:
  Block* take(size_t nbytes, int device) {
    const size_t size = (nbytes + 511) / 512 * 512;
    auto* line = current_line(device);
    std::lock_guard<std::mutex> hold(mutex_);
    auto& sizes = sizes_[device];
    sizes.now += size;
    sizes.peak = std::max(sizes.peak, sizes.now);
    auto& ready = ready_[{line, size}];
    if (!ready.empty()) {
      auto* block = ready.back();
      ready.pop_back();
      return block;
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, size) == 0, "npu: out of memory for ", size, " bytes");
    std::memset(data, 0xFF, size);
    return new Block{data, size, device, line, {}};
  }

  static void release(void* context);

  void put_back(Block* block) {
    std::memset(block->data, 0xFF, block->size);
    std::lock_guard<std::mutex> hold(mutex_);
    ready_[{block->line, block->size}].push_back(block);
  }

  std::mutex mutex_;
  std::map<std::pair<Line*, size_t>, std::vector<Block*>> ready_;
  Sizes sizes_[kDevices];
};

inline Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

inline void Memory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  auto& self = memory();
  std::vector<Line*> used_on;
  {
    std::lock_guard<std::mutex> hold(self.mutex_);
    self.sizes_[block->device].now -= block->size;
    used_on.swap(block->used_on);
  }
  auto put_back = [block] { block->line->launch([block] { memory().put_back(block); }); };
  if (used_on.empty()) return put_back();
  auto left = std::make_shared<std::atomic<size_t>>(used_on.size());
  for (auto* line : used_on) {
    line->launch([left, put_back] {
      if (--*left == 0) put_back();
    });
  }
}

}  // namespace npu
