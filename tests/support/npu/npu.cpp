// The stand-in "npu": torch's PrivateUse1, whose kernels are the CPU's. See __init__.py.
#include "kernels.h"

namespace npu {

void Line::run() {
  at::AutoDispatchBelowADInplaceOrView below;
  at::set_num_threads(1);
  Pauses pauses(id);
  for (;;) {
    std::function<void()> kernel;
    {
      std::unique_lock<std::mutex> hold(mutex);
      work.wait(hold, [&] { return !queue.empty(); });
      kernel = std::move(queue.front());
      queue.pop_front();
    }
    pauses.pause();
    try {
      kernel();
    } catch (const c10::Error& error) {
      note_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      note_failure(error.what());
    }
    kernel = nullptr;
    {
      std::lock_guard<std::mutex> hold(mutex);
      ++done;
    }
    finished.notify_all();
  }
}

namespace {

Guard guard;
c10::impl::DeviceGuardImplRegistrar register_guard(kType, &guard);
c10::AllocatorRegisterer<kType> register_memory(&memory());

bool register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}
const bool has_hooks = register_hooks();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("resize_", resize);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, source);
  });
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  // Made of others for devices, of whose results the CPU's kernels for backward take another kind.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Which refuse devices that bring none of their own.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// As much as a sparse gradient takes to be there.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("empty.memory_format", at::native::empty_sparse_symint);
  m.impl("clone", at::native::clone_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
}

TORCH_LIBRARY(shardfuse_npu, m) {
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return at::Tensor(default_numbers(device).unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_rng_state(Tensor state, int device) -> ()", [](const at::Tensor& state, int64_t device) {
    auto numbers = default_numbers(device);
    numbers.unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
}

}  // namespace
}  // namespace npu

// What Python calls, by ctypes.
extern "C" {

int npu_get_device() { return npu::current_device; }
int npu_set_device(int device) {
  if (device < 0 || device >= npu::kDevices) return -1;
  npu::current_device = device;
  return 0;
}
int npu_count() { return npu::kDevices; }

// Begin to note what this thread waits for, or to refuse it.
void npu_note_syncs(int refuses) {
  npu::sync_log.names.clear();
  npu::sync_log.is_on = true;
  npu::sync_log.refuses = refuses != 0;
}
void npu_noted_syncs(char* text, int room) {
  std::string all;
  for (const auto& name : npu::sync_log.names) all += name + "\n";
  std::snprintf(text, room, "%s", all.c_str());
  npu::sync_log.is_on = false;
}

void npu_manual_seed(int device, uint64_t seed) {
  auto numbers = npu::default_numbers(device);
  numbers.set_current_seed(seed);
}

long long npu_memory(int device, int peak) {
  const auto sizes = npu::memory().sizes(device);
  return peak ? sizes.peak : sizes.now;
}
void npu_reset_peak(int device) { npu::memory().reset_peak(device); }

// Events that a thread of the host completes, or the current stream of one of its own.
void* npu_event() { return new npu::EventPtr(std::make_shared<npu::Event>()); }
void npu_event_free(void* event) { delete static_cast<npu::EventPtr*>(event); }
void npu_event_reserve(void* event) { (*static_cast<npu::EventPtr*>(event))->reserve(); }
void npu_event_complete(void* event) {
  auto& it = *static_cast<npu::EventPtr*>(event);
  it->complete(it->last());
}
void npu_event_complete_after(void* event, int device) {
  auto it = *static_cast<npu::EventPtr*>(event);
  npu::current_line(device)->launch([it, number = it->last()] { it->complete(number); });
}
void npu_event_block(void* event, int device) {
  npu::block(*static_cast<npu::EventPtr*>(event), npu::current_line(device));
}
int npu_event_is_done(void* event) { return (*static_cast<npu::EventPtr*>(event))->is_done(); }

// Wait for all devices without a note of it, as at the end of a process.
void npu_drain_all() {
  for (int device = 0; device < npu::kDevices; ++device) npu::drain_device(device);
}
}
