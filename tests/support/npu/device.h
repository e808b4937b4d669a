// What torch asks of a device: guards, events, random numbers.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace npu {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = device.has_index() ? checked(device.index()) : current_device;
    return as_stream(index, current_ids[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(device.has_index() ? device.index() : current_device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = device.has_index() ? checked(device.index()) : current_device;
    return as_stream(index, lines().add(index)->id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = line_of(stream)->device;
    const auto before = as_stream(device, current_ids[device]);
    current_ids[device] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return line_of(stream)->is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_sync("Stream.synchronize");
    line_of(stream)->drain();
    raise_failure();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note_sync("synchronize");
    drain_device(checked(device));
    raise_failure();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().used_on(data, line_of(stream));
  }

  static EventPtr& of(void* event) { return *static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    npu::record(of(*event), line_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) npu::block(of(event), line_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || of(event)->is_done(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    note_sync("Event.synchronize");
    {
      WithoutGil released;
      of(event)->wait(of(event)->last());
    }
    raise_failure();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to && queryEvent(from) && queryEvent(to), "npu: both events must be over");
    return std::chrono::duration<double, std::milli>(of(to)->time - of(from)->time).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
};

// A generator of the CPU, which kernels use on the thread of their stream.
struct Numbers final : c10::GeneratorImpl {
  at::Generator inner;

  explicit Numbers(int device, at::Generator inner)
      : c10::GeneratorImpl(
            c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void settle() const { drain_device(device().index()); }
  void set_current_seed(uint64_t seed) override { settle(), inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { settle(), inner.set_offset(offset); }
  uint64_t get_offset() const override { return settle(), inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return settle(), inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    settle();
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Numbers* clone_impl() const override {
    settle();
    return new Numbers(device().index(), inner.clone());
  }
};

inline at::Generator new_numbers(int device) {
  return at::make_generator<Numbers>(device, at::detail::createCPUGenerator());
}
inline const at::Generator& default_numbers(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; ++index) made->push_back(new_numbers(index));
    return made;
  }();
  return (*all)[device < 0 ? current_device : checked(device)];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_numbers(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_numbers(device < 0 ? current_device : checked(device));
  }
  at::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  bool isPinnedPtr(const void*) const override { return false; }
  // Not pinned: who asks for that only is faster on a device.
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device;
    current_device = checked(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "npu: Trying to resize storage that is not resizable");
    const int before = current_device;
    current_device = storage.device().index();
    auto data = memory().allocate(size);
    auto* line = current_line(current_device);
    current_device = before;
    line->launch([to = data.get(), from = storage.data_ptr().get(),
                  count = std::min(size, storage.nbytes())] {
      if (count) std::memcpy(to, from, count);
    });
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

}  // namespace npu
