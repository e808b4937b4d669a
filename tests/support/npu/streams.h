// Streams, each a thread that does what is launched in order, and events between them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define NPU_PYTHON extern "C" __attribute__((weak))
NPU_PYTHON int Py_IsInitialized(void);
NPU_PYTHON int PyGILState_Check(void);
NPU_PYTHON void* PyEval_SaveThread(void);
NPU_PYTHON void PyEval_RestoreThread(void*);

namespace npu {

constexpr int kDevices = 8;
constexpr size_t kStreams = 32;  // of a device, besides its default one; then the first once more
constexpr auto kType = c10::DeviceType::PrivateUse1;

// Python's other threads go on while this one waits for a device: some of them launch what it waits
// for.
struct WithoutGil {
  void* state = nullptr;
  WithoutGil() {
    if (PyGILState_Check && Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  // The interpreter ends a thread that comes back to it too late, from in here.
  ~WithoutGil() noexcept(false) {
    if (state) PyEval_RestoreThread(state);
  }
};

// What this thread has waited for a device for: a host that runs ahead of it must not.
struct SyncLog {
  std::vector<std::string> names;
  bool is_on = false, refuses = false;
};
inline thread_local SyncLog sync_log;

inline void note_sync(const std::string& name) {
  if (!sync_log.is_on) return;
  TORCH_CHECK(!sync_log.refuses, "npu: the host waits for the device in ", name);
  sync_log.names.push_back(name);
}

struct NotNoted {
  const bool was_on = sync_log.is_on;
  NotNoted() { sync_log.is_on = false; }
  ~NotNoted() { sync_log.is_on = was_on; }
};

// The first error of a kernel, until somebody waits for the device and hears of it.
struct Failure {
  std::mutex mutex;
  std::string text;
};
inline Failure& failure() {
  static auto* one = new Failure;
  return *one;
}
inline void note_failure(const std::string& text) {
  std::lock_guard<std::mutex> hold(failure().mutex);
  if (failure().text.empty()) failure().text = text;
}
inline void raise_failure() {
  std::string text;
  {
    std::lock_guard<std::mutex> hold(failure().mutex);
    std::swap(text, failure().text);
  }
  TORCH_CHECK(text.empty(), "npu: a kernel failed after its launch: ", text);
}

// `pytest --late`: one kernel in so many is slow, and is overtaken by what other streams do.
struct Pauses {
  const unsigned long seed;
  std::minstd_rand numbers;

  explicit Pauses(int64_t stream) : seed(chosen()), numbers(seed + stream) {}
  void pause() {
    if (seed == 0 || numbers() % 256) return;
    std::this_thread::sleep_for(std::chrono::microseconds(numbers() % 4000));
  }
  static unsigned long chosen() {
    const char* text = std::getenv("SHARDFUSE_TEST_LATE");
    return text ? std::strtoul(text, nullptr, 10) : 0;
  }
};

struct Line {
  const int device;
  const int64_t id;
  std::mutex mutex;
  std::condition_variable work, finished;
  std::deque<std::function<void()>> queue;
  uint64_t launched = 0, done = 0;
  bool has_thread = false;

  Line(int device, int64_t id) : device(device), id(id) {}

  void launch(std::function<void()> kernel) {
    std::lock_guard<std::mutex> hold(mutex);
    ++launched;
    queue.push_back(std::move(kernel));
    if (!has_thread) {
      has_thread = true;
      std::thread([this] { run(); }).detach();
    }
    work.notify_one();
  }

  void drain() {
    WithoutGil released;
    std::unique_lock<std::mutex> hold(mutex);
    const auto target = launched;
    finished.wait(hold, [&] { return done >= target; });
  }

  bool is_idle() {
    std::lock_guard<std::mutex> hold(mutex);
    return done == launched;
  }

 private:
  void run();
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  std::chrono::steady_clock::time_point time;

  uint64_t reserve() {
    std::lock_guard<std::mutex> hold(mutex);
    return ++recorded;
  }
  uint64_t last() {
    std::lock_guard<std::mutex> hold(mutex);
    return recorded;
  }
  void complete(uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex);
    done = std::max(done, number);
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> hold(mutex);
    changed.wait(hold, [&] { return done >= number; });
  }
  bool is_done() {
    std::lock_guard<std::mutex> hold(mutex);
    return done >= recorded;
  }
};
using EventPtr = std::shared_ptr<Event>;

inline void record(const EventPtr& event, Line* line) {
  line->launch([event, number = event->reserve()] { event->complete(number); });
}
inline void block(const EventPtr& event, Line* line) {
  line->launch([event, number = event->last()] { event->wait(number); });
}

struct Lines {
  std::mutex mutex;
  std::vector<Line*> of[kDevices];
  size_t num_asked[kDevices] = {};

  Line* get(int device, int64_t id) {
    std::lock_guard<std::mutex> hold(mutex);
    auto& lines = of[device];
    if (lines.empty()) lines.push_back(new Line(device, 0));
    TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(lines.size()), "npu: no stream ", id);
    return lines[id];
  }
  Line* add(int device) {
    get(device, 0);
    std::lock_guard<std::mutex> hold(mutex);
    auto& lines = of[device];
    const size_t id = 1 + num_asked[device]++ % kStreams;
    if (id == lines.size()) lines.push_back(new Line(device, id));
    return lines[id];
  }
  std::vector<Line*> all(int device) {
    std::lock_guard<std::mutex> hold(mutex);
    return of[device];
  }
};
inline Lines& lines() {
  static auto* all = new Lines;
  return *all;
}

inline thread_local int current_device = 0;
inline thread_local int64_t current_ids[kDevices] = {};

inline int checked(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "npu: invalid device ordinal ", device);
  return device;
}
inline Line* current_line(int device) {
  return lines().get(checked(device), current_ids[device]);
}
inline Line* line_of(const c10::Stream& stream) {
  return lines().get(checked(stream.device_index()), stream.id());
}
inline c10::Stream as_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}
inline void drain_device(int device) {
  for (auto* line : lines().all(device)) line->drain();
}

}  // namespace npu
