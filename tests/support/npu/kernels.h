// Operators: the CPU's kernels, launched on the current stream, over memory of the device.
//
// Shapes of results come from torch's meta kernels, so that a launch waits for nothing. Where those
// do not know, because a shape depends on data, the host waits as it does on a device.
#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace npu {

using c10::IValue;
using torch::jit::Stack;

inline bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A number that was made a tensor has a dtype that gives way to others.
inline void keep_wrapped(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// Views of device memory as tensors of the CPU, for kernels; they own nothing.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      const auto& from = tensor.storage();
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), from.nbytes(),
          c10::DataPtr(const_cast<void*>(from.data_ptr().get()), c10::Device(c10::kCPU)), nullptr,
          false));
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = result.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    keep_wrapped(tensor, result);
    return result;
  }

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages_;
};

inline at::Tensor as_meta(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).requires_grad(false));
}

using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

inline IValue with_tensors(const IValue& value, const OnTensor& function) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? IValue(function(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& each : value.toTensorVector())
      result.push_back(each.defined() ? function(each) : each);
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      result.push_back(each && each->defined() ? std::optional(function(*each)) : each);
    return result;
  }
  return value;
}

inline bool takes_indices_of_the_host(const std::string& name) {
  return name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put" ||
      name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::_unsafe_index_put";
}

inline bool depends_on_data(const std::string& name) {
  static const std::vector<std::string> names = {
      "nonzero", "unique", "masked_select", "bincount", "repeat_interleave", "histc", "argwhere"};
  if (takes_indices_of_the_host(name)) return true;
  for (const auto& each : names)
    if (name.find(each) != std::string::npos) return true;
  return false;
}

// The CPU saves statistics of these in another dtype than the meta kernels say.
inline bool differs_from_meta(const std::string& name) {
  return name.find("layer_norm") != std::string::npos || name.find("group_norm") != std::string::npos;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack),
        arguments_(torch::jit::last(*stack, schema_.arguments().size()).vec()) {
    find_device();
  }

  void run() {
    const auto shapes = try_shapes();
    if (!shapes) return run_at_once();
    auto kernel_arguments = on_host();
    std::vector<IValue> results;
    std::vector<std::pair<size_t, at::Tensor>> fresh;
    for (size_t index = 0; index < shapes->size(); ++index)
      results.push_back(result_like(index, (*shapes)[index], fresh));
    Aliases into;
    for (auto& [index, tensor] : fresh) tensor = into.of(tensor);
    current_line(device_)->launch([op = op_, arguments = std::move(kernel_arguments),
                                   fresh = std::move(fresh)]() mutable {
      op.callBoxed(&arguments);
      // A backward leaves out gradients that nothing needs, and a batch norm in evaluation has no
      // statistics to save: their meta kernels make both.
      for (auto& [index, tensor] : fresh) {
        const auto& made = arguments[index].toTensor();
        if (made.defined() && (made.numel() > 0 || tensor.numel() == 0)) tensor.copy_(made);
      }
    });
    give(std::move(results));
  }

 private:
  const std::string& name() const { return schema_.name(); }

  void find_device() {
    std::string at;
    for (const auto& value : arguments_) {
      with_tensors(value, [&](const at::Tensor& tensor) {
        if (is_npu(tensor)) {
          TORCH_CHECK(
              device_ < 0 || device_ == tensor.device().index(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              tensor.device(), " and ", kType, ":", device_, "! (", name(), ")");
          device_ = tensor.device().index();
        }
        return tensor;
      });
      if (value.isDevice() && value.toDevice().type() == kType && device_ < 0)
        device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    }
    if (device_ < 0) device_ = current_device;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto* alias = schema_.arguments()[index].alias_info();
      const bool is_written = alias && alias->isWrite();
      with_tensors(arguments_[index], [&](const at::Tensor& tensor) {
        TORCH_CHECK(
            is_npu(tensor) ||
                (!is_written && (tensor.dim() == 0 || takes_indices_of_the_host(name()))),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            tensor.device(), " and ", kType, ":", device_, "! (", name(), ")");
        return tensor;
      });
    }
  }

  bool is_written(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    return alias && alias->isWrite();
  }

  // Arguments as the kernel gets them: what is on the host is copied now, as it may change.
  Stack on_host() const {
    Aliases aliases;
    Stack result;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto& value = arguments_[index];
      if (value.isDevice()) {
        result.emplace_back(c10::Device(c10::kCPU));
      } else if (is_generator(index)) {
        result.emplace_back(numbers_of(value));
      } else {
        result.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
          if (is_npu(tensor)) return aliases.of(tensor);
          auto copy = tensor.clone();
          keep_wrapped(tensor, copy);
          return copy;
        }));
      }
    }
    return result;
  }

  bool is_generator(size_t index) const {
    const auto& type = schema_.arguments()[index].real_type();
    if (type->kind() == c10::TypeKind::GeneratorType) return true;
    return type->kind() == c10::TypeKind::OptionalType &&
        type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
        c10::TypeKind::GeneratorType;
  }

  at::Generator numbers_of(const IValue& value) const {
    const auto generator = value.isNone() ? default_numbers(device_) : value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kType, "Expected a '", kType,
        "' device type for generator but found '", generator.device().type(), "'");
    return static_cast<Numbers*>(generator.unsafeGetGeneratorImpl())->inner;
  }

  // What the meta kernel returns, or nothing where there is none, or where the call is wrong: the
  // kernel itself then says so.
  std::optional<Stack> try_shapes() const {
    if (differs_from_meta(name())) return std::nullopt;
    for (const auto& each : schema_.returns())
      if (each.type()->kind() != c10::TypeKind::TensorType) return std::nullopt;
    Stack stack;
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto& value = arguments_[index];
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kMeta));
      } else if (is_generator(index)) {
        stack.emplace_back();
      } else {
        stack.push_back(with_tensors(value, [](const at::Tensor& tensor) {
          return is_npu(tensor) ? as_meta(tensor) : tensor;
        }));
      }
    }
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (size_t index = 0; index < stack.size(); ++index) {
      if (!stack[index].isTensor()) return std::nullopt;
      if (is_written(index) && stack[index].toTensor().sizes() != target(index).sizes())
        target(index).resize_(stack[index].toTensor().sizes());
    }
    return stack;
  }

  // The argument that a result is.
  const at::Tensor& target(size_t result) const {
    const auto* wanted = schema_.returns()[result].alias_info();
    for (size_t index = 0; index < arguments_.size(); ++index) {
      const auto* alias = schema_.arguments()[index].alias_info();
      if (alias && alias->beforeSets() == wanted->beforeSets()) return arguments_[index].toTensor();
    }
    TORCH_CHECK(false, "npu: ", name(), " returns what it was not given");
  }

  IValue result_like(
      size_t index, const IValue& shape, std::vector<std::pair<size_t, at::Tensor>>& fresh) const {
    const auto* alias = schema_.returns()[index].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "npu: no kernel for the view ", name());
    if (alias) return target(index);
    const auto& meta = shape.toTensor();
    if (!meta.defined()) return shape;
    auto made = at::empty_strided(
        meta.sizes(), meta.strides(), meta.options().device(c10::Device(kType, device_)));
    fresh.emplace_back(index, made);
    return made;
  }

  void run_at_once() {
    const bool tells = std::any_of(
        schema_.returns().begin(), schema_.returns().end(), [](const c10::Argument& each) {
          const auto kind = each.type()->kind();
          return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
        });
    if (tells || depends_on_data(name())) note_sync(name());
    current_line(device_)->drain();
    raise_failure();
    auto arguments = on_host();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&arguments);
    }
    const NotNoted results_are_the_devices_own;
    std::vector<IValue> results;
    for (size_t index = 0; index < arguments.size(); ++index) {
      if (is_written(index) && arguments[index].isTensor()) {
        results.emplace_back(target(index));
      } else {
        results.push_back(with_tensors(arguments[index], [&](const at::Tensor& tensor) {
          return tensor.to(c10::Device(kType, device_));
        }));
      }
    }
    give(std::move(results));
  }

  void give(std::vector<IValue> results) {
    torch::jit::drop(*stack_, schema_.arguments().size());
    for (auto& each : results) stack_->push_back(std::move(each));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<IValue> arguments_;
  int device_ = -1;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType)));
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Between devices both streams meet, before and after.
inline void meet(int here, int there) {
  auto event = std::make_shared<Event>();
  record(event, current_line(there));
  block(event, current_line(here));
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Aliases aliases;
  const int source = is_npu(from) ? from.device().index() : -1;
  const int target = is_npu(to) ? to.device().index() : -1;
  auto* line = current_line(target >= 0 ? target : source);
  const bool crosses = source >= 0 && target >= 0 && source != target;
  if (crosses) meet(target, source);
  if (source < 0 && !non_blocking) note_sync("copy to the device");
  auto kernel = [source_tensor = source >= 0 ? aliases.of(from) : from.clone(),
                 target_tensor = target >= 0 ? aliases.of(to) : to] {
    target_tensor.copy_(source_tensor);
  };
  line->launch(std::move(kernel));
  if (crosses) meet(source, target);
  if (target < 0 && !non_blocking) {
    note_sync("copy to the host");
    line->drain();
    raise_failure();
  }
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar(const at::Tensor& self) {
  note_sync("item");
  current_line(self.device().index())->drain();
  raise_failure();
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  memory().used_on(self.storage().data_ptr(), line_of(stream));
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = 1;
  for (auto each : size) count *= each;
  const auto nbytes = (self.storage_offset() + count) * self.itemsize();
  const auto storage = self.storage();
  if (count && static_cast<size_t>(nbytes) > storage.nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

}  // namespace npu
