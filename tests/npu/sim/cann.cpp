// Bodies of the CANN functions whose behaviour matters without a device. Every other symbol that torch_npu needs becomes
// a function returning 0 (stubs.py). Memory is host memory; streams, events and graphs are handles without content.
// LOPA_SIM_DEVICES: number of devices that exist (default none). LOPA_SIM_TRACE=1: print every call.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#define EXPORT __attribute__((visibility("default")))

namespace {
constexpr int kInvalidDevice = 107001, kNoCurrentDevice = 107002, kOutOfMemory = 207001, kBufferTooSmall = 34;
constexpr size_t kMemory = size_t(64) << 30;
thread_local int current_device = -1;
bool is_capturing = false;
void* captured_graph = nullptr;
long last_handle = 0x1000;

int num_devices() {
  const char* text = getenv("LOPA_SIM_DEVICES");
  return text ? atoi(text) : 0;
}
void* new_handle() { return reinterpret_cast<void*>(last_handle += 16); }
int allocate(void** out, size_t bytes, size_t alignment) {
  return posix_memalign(out, alignment, bytes ? bytes : alignment) ? kOutOfMemory : 0;
}
template <class T>
int give(T* out, T value) {
  *out = value;
  return 0;
}
int copy(void* to, const void* from, size_t bytes) {
  if (bytes) memmove(to, from, bytes);
  return 0;
}
}  // namespace

extern "C" {
EXPORT long lopa_sim_called(const char* name) {
  static const char* wanted = getenv("LOPA_SIM_TRACE");
  if (wanted && *wanted == '1') fprintf(stderr, "[cann stub] %s\n", name);
  return 0;
}

// ---- bounded strings
EXPORT int vsnprintf_s(char* to, size_t size, size_t count, const char* format, va_list list) {
  return vsnprintf(to, size < count + 1 ? size : count + 1, format, list);
}
EXPORT int snprintf_s(char* to, size_t size, size_t count, const char* format, ...) {
  va_list list;
  va_start(list, format);
  int written = vsnprintf_s(to, size, count, format, list);
  va_end(list);
  return written;
}
EXPORT int strcpy_s(char* to, size_t size, const char* from) {
  if (strlen(from) + 1 > size) return kBufferTooSmall;
  strcpy(to, from);
  return 0;
}

// ---- devices
EXPORT int aclrtGetDeviceCount(uint32_t* out) {
  *out = num_devices();
  return num_devices() ? 0 : kInvalidDevice;
}
EXPORT int aclrtGetDevice(int32_t* out) { return current_device < 0 ? kNoCurrentDevice : give(out, int32_t(current_device)); }
EXPORT int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  current_device = device;
  return 0;
}
EXPORT int aclrtResetDevice(int32_t) {
  current_device = -1;
  return 0;
}
EXPORT const char* aclrtGetSocName() { return "Ascend910_9391"; }
EXPORT const char* aclGetRecentErrMsg() { return "simulated: no CANN on this machine"; }
EXPORT void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
EXPORT int aclrtGetCurrentContext(void** out) { return give(out, reinterpret_cast<void*>(1)); }
EXPORT int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* out) { return give(out, user); }
EXPORT int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* is_active) {
  if (flags) *flags = 0;
  return give(is_active, int32_t(current_device >= 0));
}
EXPORT int aclrtDeviceCanAccessPeer(int32_t* out, int32_t, int32_t) { return give(out, 1); }
EXPORT int aclrtDeviceGetBareTgid(int32_t* out) { return give(out, 1); }
EXPORT int aclGetDeviceCapability(uint32_t, int, int64_t* out) { return give(out, int64_t(0)); }
EXPORT int aclrtGetDeviceInfo(uint32_t, int, int64_t* out) { return give(out, int64_t(24)); }
EXPORT int aclrtGetDeviceResLimit(int32_t, int, uint32_t* out) { return give(out, 24u); }
EXPORT int aclrtGetStreamResLimit(void*, int, uint32_t* out) { return give(out, 24u); }
EXPORT int aclrtGetSysParamOpt(int, int64_t* out) { return give(out, int64_t(0)); }
EXPORT int aclGetCannAttribute(int, int32_t* out) { return give(out, 0); }
EXPORT int aclsysGetCANNVersion(int, void* out) {
  memset(out, 0, 128);
  strcpy(static_cast<char*>(out), "8.5.0");
  return 0;
}
EXPORT size_t aclGetCompileoptSize(int) { return 256; }
EXPORT int aclGetCompileopt(int, char* out, size_t size) {
  if (size) out[0] = 0;
  return 0;
}

// ---- communicators: each has a name of its own
EXPORT int HcclCommInitRootInfo(uint32_t, const void*, uint32_t, void** out) { return give(out, new_handle()); }
EXPORT int HcclCommInitRootInfoConfig(uint32_t, const void*, uint32_t, const void*, void** out) {
  return give(out, new_handle());
}
EXPORT int HcclGetCommName(void* communicator, char* out) {
  sprintf(out, "simulated_%p", communicator);
  return 0;
}

// ---- memory
EXPORT int aclrtMalloc(void** out, size_t bytes, int) { return allocate(out, bytes, 512); }
EXPORT int aclrtMallocAlign32(void** out, size_t bytes, int) { return allocate(out, bytes, 512); }
EXPORT int aclrtMallocHost(void** out, size_t bytes) { return allocate(out, bytes, 64); }
EXPORT int aclrtMallocHostWithCfg(void** out, size_t bytes, void*) { return allocate(out, bytes, 64); }
EXPORT int aclrtFree(void* memory) {
  free(memory);
  return 0;
}
EXPORT int aclrtFreeHost(void* memory) { return aclrtFree(memory); }
EXPORT int aclrtGetMemInfo(int, size_t* unused, size_t* total) {
  *unused = *total = kMemory;
  return 0;
}
EXPORT int aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, int) { return copy(to, from, bytes); }
EXPORT int aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, int, void*) { return copy(to, from, bytes); }
EXPORT int aclrtMemcpyAsyncWithCondition(void* to, size_t, const void* from, size_t bytes, int, void*) {
  return copy(to, from, bytes);
}
EXPORT int aclrtMemset(void* to, size_t, int value, size_t bytes) {
  memset(to, value, bytes);
  return 0;
}
EXPORT int aclrtMemsetAsync(void* to, size_t size, int value, size_t bytes, void*) {
  return aclrtMemset(to, size, value, bytes);
}

// ---- streams and events: everything has happened already
EXPORT int aclrtCreateStream(void** out) { return give(out, new_handle()); }
EXPORT int aclrtCreateStreamWithConfig(void** out, uint32_t, uint32_t) { return give(out, new_handle()); }
EXPORT int aclrtCreateEventExWithFlag(void** out, uint32_t) { return give(out, new_handle()); }
EXPORT int aclrtCreateEventWithFlag(void** out, uint32_t) { return give(out, new_handle()); }
EXPORT int aclrtEventElapsedTime(float* out, void*, void*) { return give(out, 0.0f); }
EXPORT int aclrtQueryEventStatus(void*, int* out) { return give(out, 1); }
EXPORT int aclrtQueryEventWaitStatus(void*, int* out) { return give(out, 1); }
EXPORT int aclrtStreamQuery(void*, int* out) { return give(out, 0); }
EXPORT int aclrtStreamGetId(void*, int32_t* out) { return give(out, 1); }
EXPORT int aclrtGetStreamOverflowSwitch(void*, uint32_t* out) { return give(out, 0u); }
EXPORT int aclrtPeekAtLastError(int) { return 0; }
EXPORT int aclrtGetLastError(int) { return 0; }
EXPORT uint64_t MsprofSysCycleTime() { return 0; }

// ---- graph capture: the state machine only, graph.py records the operators
EXPORT int aclmdlRICaptureGetInfo(void*, int* state, void** graph) {
  if (graph) *graph = is_capturing ? captured_graph : nullptr;
  return give(state, int(is_capturing));
}
EXPORT int aclmdlRICaptureBegin(void*, int) {
  is_capturing = true;
  return give(&captured_graph, new_handle());
}
EXPORT int aclmdlRICaptureEnd(void*, void** out) {
  is_capturing = false;
  return give(out, captured_graph);
}
EXPORT int aclmdlRICaptureTaskGrpBegin(void*) { return 0; }
EXPORT int aclmdlRICaptureTaskGrpEnd(void*, void** out) { return give(out, new_handle()); }
EXPORT int aclmdlRICaptureThreadExchangeMode(int* out) { return give(out, 0); }
}

// ---- GE classes that torchair builds its option tables from
namespace ge {
class AscendString {
 public:
  AscendString() = default;
  ~AscendString() = default;
  EXPORT AscendString(const char* text);
  EXPORT const char* GetString() const;
  EXPORT bool operator<(const AscendString& other) const;
  EXPORT bool operator==(const AscendString& other) const;

 private:
  std::shared_ptr<std::string> name_;
};
AscendString::AscendString(const char* text) {
  if (text) name_ = std::make_shared<std::string>(text);
}
const char* AscendString::GetString() const { return name_ ? name_->c_str() : ""; }
bool AscendString::operator<(const AscendString& other) const { return strcmp(GetString(), other.GetString()) < 0; }
bool AscendString::operator==(const AscendString& other) const { return strcmp(GetString(), other.GetString()) == 0; }
EXPORT std::string GEGetErrorMsg();
std::string GEGetErrorMsg() { return "simulated: no GE"; }
EXPORT AscendString GEGetWarningMsgV2();
AscendString GEGetWarningMsgV2() { return AscendString(""); }
}  // namespace ge
