// A device of type "GPU" in host memory, by TensorFlow's interface for pluggable devices.
//
// Everything queued on a stream has happened when the call returns.
#include <chrono>
#include <cstdlib>

#include "cuda_runtime_api.h"
#include "memory.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

struct SP_Stream_st {};
struct SP_Event_st {};
struct SP_Timer_st {
  uint64_t begin, end;
};

namespace {

void Ok(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

uint64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void Allocate(const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = tf_dgc_test_device_allocate(size);
  memory->size = memory->opaque == nullptr ? 0 : size;
}

void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  if (memory->opaque != nullptr) tf_dgc_test_device_free(memory->opaque);
  memory->opaque = nullptr;
  memory->size = 0;
}

void Copy(void* to, const void* from, uint64_t size, cudaMemcpyKind kind, TF_Status* status) {
  cudaMemcpyAsync(to, from, size, kind, nullptr);
  Ok(status);
}

void ToHost(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
            TF_Status* status) {
  Copy(to, from->opaque, size, cudaMemcpyDeviceToHost, status);
}

void ToDevice(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
              TF_Status* status) {
  Copy(to->opaque, from, size, cudaMemcpyHostToDevice, status);
}

void OnDevice(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
              uint64_t size, TF_Status* status) {
  Copy(to->opaque, from->opaque, size, cudaMemcpyDeviceToDevice, status);
}

void Fill(SP_DeviceMemoryBase* memory, const void* pattern, size_t width, uint64_t size) {
  char* bytes = static_cast<char*>(tf_dgc_test_device_open(memory->opaque, size, "fill"));
  for (uint64_t i = 0; i < size; ++i) bytes[i] = static_cast<const char*>(pattern)[i % width];
}

void CreateStreamExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params,
                          TF_Status* status) {
  SP_StreamExecutor* executor = params->stream_executor;
  executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  executor->allocate = Allocate;
  executor->deallocate = Deallocate;
  executor->host_memory_allocate = [](const SP_Device*, uint64_t size) {
    return std::aligned_alloc(64, (size + 63) / 64 * 64);
  };
  executor->host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  executor->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool {
    return false;
  };
  executor->device_memory_usage = [](const SP_Device*, int64_t* free, int64_t* total) -> TF_Bool {
    *free = *total = int64_t{4} << 30;
    return true;
  };
  executor->create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status* status) {
    *stream = new SP_Stream_st;
    Ok(status);
  };
  executor->destroy_stream = [](const SP_Device*, SP_Stream stream) { delete stream; };
  executor->create_stream_dependency = [](const SP_Device*, SP_Stream, SP_Stream,
                                          TF_Status* status) { Ok(status); };
  executor->get_stream_status = [](const SP_Device*, SP_Stream, TF_Status* status) { Ok(status); };
  executor->create_event = [](const SP_Device*, SP_Event* event, TF_Status* status) {
    *event = new SP_Event_st;
    Ok(status);
  };
  executor->destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  executor->get_event_status = [](const SP_Device*, SP_Event) { return SE_EVENT_COMPLETE; };
  executor->record_event = [](const SP_Device*, SP_Stream, SP_Event, TF_Status* status) {
    Ok(status);
  };
  executor->wait_for_event = [](const SP_Device* const, SP_Stream, SP_Event,
                                TF_Status* const status) { Ok(status); };
  executor->create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status* status) {
    *timer = new SP_Timer_st{};
    Ok(status);
  };
  executor->destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  executor->start_timer = [](const SP_Device*, SP_Stream, SP_Timer timer, TF_Status* status) {
    timer->begin = Now();
    Ok(status);
  };
  executor->stop_timer = [](const SP_Device*, SP_Stream, SP_Timer timer, TF_Status* status) {
    timer->end = Now();
    Ok(status);
  };
  executor->sync_memcpy_dtoh = ToHost;
  executor->sync_memcpy_htod = ToDevice;
  executor->sync_memcpy_dtod = OnDevice;
  executor->memcpy_dtoh = [](const SP_Device* device, SP_Stream, void* to,
                             const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
    ToHost(device, to, from, size, status);
  };
  executor->memcpy_htod = [](const SP_Device* device, SP_Stream, SP_DeviceMemoryBase* to,
                             const void* from, uint64_t size, TF_Status* status) {
    ToDevice(device, to, from, size, status);
  };
  executor->memcpy_dtod = [](const SP_Device* device, SP_Stream, SP_DeviceMemoryBase* to,
                             const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
    OnDevice(device, to, from, size, status);
  };
  executor->block_host_for_event = [](const SP_Device*, SP_Event, TF_Status* status) {
    Ok(status);
  };
  executor->block_host_until_done = [](const SP_Device*, SP_Stream, TF_Status* status) {
    Ok(status);
  };
  executor->synchronize_all_activity = [](const SP_Device*, TF_Status* status) { Ok(status); };
  executor->mem_zero = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint64_t size,
                          TF_Status* status) {
    const char zero = 0;
    Fill(memory, &zero, 1, size);
    Ok(status);
  };
  executor->memset = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory, uint8_t pattern,
                        uint64_t size, TF_Status* status) {
    Fill(memory, &pattern, sizeof(pattern), size);
    Ok(status);
  };
  executor->memset32 = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase* memory,
                          uint32_t pattern, uint64_t size, TF_Status* status) {
    Fill(memory, &pattern, sizeof(pattern), size);
    Ok(status);
  };
  executor->host_callback = [](const SP_Device*, SP_Stream, SE_StatusCallbackFn callback,
                               void* argument) -> TF_Bool {
    TF_Status* status = TF_NewStatus();
    callback(argument, status);
    TF_DeleteStatus(status);
    return true;
  };
  Ok(status);
}

}  // namespace

extern "C" void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "TF_DGC_TEST_DEVICE";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = false;
  params->platform->use_bfc_allocator = false;
  SP_PlatformFns* functions = params->platform_fns;
  functions->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions->get_device_count = [](const SP_Platform*, int* count, TF_Status* status) {
    const char* number = std::getenv("TF_DGC_TEST_DEVICES");
    *count = number == nullptr ? 1 : std::atoi(number);
    Ok(status);
  };
  functions->create_device = [](const SP_Platform*, SE_CreateDeviceParams* params,
                                TF_Status* status) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->ordinal = params->ordinal;
    params->device->hardware_name = "test device of tf_dgc";
    params->device->device_vendor = "tf_dgc";
    params->device->pci_bus_id = "0000:00:00.0";
    Ok(status);
  };
  functions->destroy_device = [](const SP_Platform*, SP_Device*) {};
  functions->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params,
                                    TF_Status* status) {
    params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    Ok(status);
  };
  functions->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  functions->create_stream_executor = CreateStreamExecutor;
  functions->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  functions->create_timer_fns = [](const SP_Platform*, SP_TimerFns* functions,
                                   TF_Status* status) {
    functions->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    functions->nanoseconds = [](SP_Timer timer) { return timer->end - timer->begin; };
    Ok(status);
  };
  functions->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  Ok(status);
}
