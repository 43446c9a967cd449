// Checks the contract of drivers on the named one: host, faulty or cuda.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "driver/driver.hpp"
#include "faults/faulty_driver.hpp"
#include "support/error.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t used(Driver& driver) {
  const MemoryInfo info = driver.memory_info(0);
  return info.total_bytes - info.free_bytes;
}

// Host memory that the driver can copy from and to.
struct HostMemory {
  HostMemory(Driver& owner, std::size_t size) : driver(owner), bytes(size) {
    data = static_cast<unsigned char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    CHECK(data != MAP_FAILED);
    driver.register_host(data, bytes);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() {
    driver.unregister_host(data);
    munmap(data, bytes);
  }
  Driver& driver;
  std::size_t bytes;
  unsigned char* data;
};

void wait_for(Driver& driver, Stream stream) {
  const Event event = driver.record(0, stream);
  driver.wait(0, event);
  CHECK(driver.done(0, event));
  driver.recycle(0, event);
}

void device_is_described(Driver& driver) {
  CHECK(driver.device_count() >= 1);
  const DeviceInfo info = driver.device_info(0);
  CHECK(!info.uuid.empty() && !info.name.empty());
  CHECK(info.total_bytes > 0 && info.granularity > 0);
  CHECK_THROWS(driver.device_info(driver.device_count()), ErrorKind::configuration);
  CHECK_THROWS(driver.create(-1, info.granularity), ErrorKind::configuration);
}

void memory_goes_behind_an_address_and_away(Driver& driver) {
  const std::size_t bytes = driver.device_info(0).granularity * 8;
  const Address address = driver.reserve(0, 4 * bytes);
  const Stream stream = driver.create_stream(0);
  HostMemory host(driver, 2 * bytes);
  const std::size_t before = used(driver);
  for (int round = 0; round < 3; ++round) {
    // Two handles side by side, used as one range; the second one first.
    const Handle second = driver.create(0, bytes);
    const Handle first = driver.create(0, bytes);
    CHECK(used(driver) >= before + 2 * bytes);
    driver.map(0, address + bytes, bytes, second);
    driver.map(0, address, bytes, first);
    driver.allow_access(0, address, bytes, {});
    driver.allow_access(0, address + bytes, bytes, {});
    for (std::size_t i = 0; i < 2 * bytes; ++i) host.data[i] = static_cast<unsigned char>(i * 31 + round);
    driver.copy_to_device(0, address, host.data, 2 * bytes, stream);
    wait_for(driver, stream);
    std::memset(host.data, 0, 2 * bytes);
    driver.copy_to_host(0, host.data, address, 2 * bytes, stream);
    wait_for(driver, stream);
    for (std::size_t i = 0; i < 2 * bytes; ++i) CHECK(host.data[i] == static_cast<unsigned char>(i * 31 + round));
    driver.fill_zero(0, address + bytes / 2, bytes, stream);
    driver.copy_to_host(0, host.data, address, 2 * bytes, stream);
    wait_for(driver, stream);
    CHECK(host.data[bytes / 2 - 1] == static_cast<unsigned char>((bytes / 2 - 1) * 31 + round));
    CHECK(host.data[bytes / 2] == 0 && host.data[bytes + bytes / 2 - 1] == 0);
    driver.synchronize(0);
    driver.unmap(0, address, bytes);
    driver.unmap(0, address + bytes, bytes);
    driver.release(0, first, bytes);
    driver.release(0, second, bytes);
    CHECK(used(driver) <= before + kMiB * 4);
  }
  driver.destroy_stream(0, stream);
  driver.unreserve(0, address, 4 * bytes);
}

void memory_is_shared(Driver& driver) {
  const std::size_t bytes = driver.device_info(0).granularity * 2;
  const std::size_t before = used(driver);
  const Address ours = driver.reserve(0, bytes);
  const Address theirs = driver.reserve(0, bytes);
  const Stream stream = driver.create_stream(0);
  HostMemory host(driver, bytes);
  const Handle handle = driver.create(0, bytes, true);
  const int file = driver.export_handle(0, handle);
  const Handle imported = driver.import_handle(0, file, bytes);
  CHECK(close(file) == 0);
  driver.map(0, ours, bytes, handle);
  driver.allow_access(0, ours, bytes, {});
  driver.map(0, theirs, bytes, imported);
  driver.allow_access(0, theirs, bytes, {});
  for (std::size_t i = 0; i < bytes; ++i) host.data[i] = static_cast<unsigned char>(i * 13);
  driver.copy_to_device(0, ours, host.data, bytes, stream);
  wait_for(driver, stream);
  driver.synchronize(0);
  driver.unmap(0, ours, bytes);
  driver.release(0, handle, bytes);
  std::memset(host.data, 0, bytes);
  driver.copy_to_host(0, host.data, theirs, bytes, stream);
  wait_for(driver, stream);
  for (std::size_t i = 0; i < bytes; ++i) CHECK(host.data[i] == static_cast<unsigned char>(i * 13));
  driver.synchronize(0);
  driver.unmap(0, theirs, bytes);
  driver.release(0, imported, bytes);
  CHECK(used(driver) <= before + kMiB * 4);
  driver.destroy_stream(0, stream);
  driver.unreserve(0, ours, bytes);
  driver.unreserve(0, theirs, bytes);
  CHECK_THROWS(driver.import_handle(0, file, bytes), ErrorKind::driver);
}

void too_much_is_out_of_memory(Driver& driver) {
  const std::size_t before = used(driver);
  const DeviceInfo info = driver.device_info(0);
  CHECK_THROWS(driver.create(0, (info.total_bytes / info.granularity + 1) * info.granularity),
               ErrorKind::out_of_device_memory);
  CHECK(used(driver) <= before + kMiB * 4);
  const Handle handle = driver.create(0, info.granularity);  // the driver still works
  driver.release(0, handle, info.granularity);
}

void stacks_are_given_back(Driver& driver) {
  const std::size_t limit = driver.stack_limit(0);
  const std::size_t before = used(driver);
  CHECK(limit > 16);
  driver.set_stack_limit(0, 16);
  CHECK(driver.stack_limit(0) == 16);
  if (!driver.in_host_memory())
    CHECK(used(driver) + 64 * kMiB < before);  // other processes allocate a little meanwhile
  driver.set_stack_limit(0, limit);
  CHECK(driver.stack_limit(0) == limit);
  CHECK(used(driver) <= before + kMiB * 4);
}

// NVIDIA's driver clears memory that is freed, which its documentation does not promise: a restore relies on it.
void new_memory_is_zero(Driver& driver) {
  const std::size_t bytes = 64 * kMiB;
  const Address address = driver.reserve(0, bytes);
  const Stream stream = driver.create_stream(0);
  HostMemory host(driver, bytes);
  for (int round = 0; round < 4; ++round) {
    const Handle handle = driver.create(0, bytes);
    driver.map(0, address, bytes, handle);
    driver.allow_access(0, address, bytes, {});
    driver.copy_to_host(0, host.data, address, bytes, stream);
    wait_for(driver, stream);
    CHECK(std::all_of(host.data, host.data + bytes, [](unsigned char byte) { return byte == 0; }));
    std::memset(host.data, 0x5a, bytes);
    driver.copy_to_device(0, address, host.data, bytes, stream);
    wait_for(driver, stream);
    driver.synchronize(0);
    driver.unmap(0, address, bytes);
    driver.release(0, handle, bytes);
  }
  driver.destroy_stream(0, stream);
  driver.unreserve(0, address, bytes);
}

void streams_are_ordered_by_events(Driver& driver) {
  const std::size_t bytes = driver.device_info(0).granularity;
  const Address address = driver.reserve(0, bytes);
  const Handle handle = driver.create(0, bytes);
  driver.map(0, address, bytes, handle);
  driver.allow_access(0, address, bytes, {});
  const Stream one = driver.create_stream(0);
  const Stream other = driver.create_stream(0);
  HostMemory host(driver, bytes);
  std::memset(host.data, 0x5a, bytes);
  driver.fill_zero(0, address, bytes, one);
  driver.copy_to_device(0, address, host.data, bytes, one);
  const Event written = driver.record(0, one);
  driver.stream_wait(0, other, written);
  driver.fill_zero(0, address, bytes / 2, other);
  wait_for(driver, other);
  driver.recycle(0, written);
  driver.copy_to_host(0, host.data, address, bytes, other);
  wait_for(driver, other);
  CHECK(host.data[0] == 0 && host.data[bytes / 2 - 1] == 0);
  CHECK(host.data[bytes / 2] == 0x5a && host.data[bytes - 1] == 0x5a);
  driver.destroy_stream(0, one);
  driver.destroy_stream(0, other);
  driver.unmap(0, address, bytes);
  driver.release(0, handle, bytes);
  driver.unreserve(0, address, bytes);
}

void digests_equal_the_reference(Driver& driver) {
  if (!driver.has_digest(0)) return;
  const std::size_t granularity = driver.device_info(0).granularity;
  const std::size_t bytes = (3 * kMiB / granularity + 1) * granularity;
  const Address address = driver.reserve(0, bytes);
  const Handle handle = driver.create(0, bytes);
  driver.map(0, address, bytes, handle);
  driver.allow_access(0, address, bytes, {});
  const Stream stream = driver.create_stream(0);
  HostMemory host(driver, bytes);
  for (std::size_t i = 0; i < bytes; ++i) host.data[i] = static_cast<unsigned char>((i * 2654435761u) >> 13);
  driver.copy_to_device(0, address, host.data, bytes, stream);
  HostMemory table(driver, 1 << 16);
  auto* const items = reinterpret_cast<DigestItem*>(table.data);
  auto* const results = reinterpret_cast<Digest*>(table.data + (1 << 15));
  const std::vector<std::size_t> sizes{16, 4080, 4096, 65536, 262144, 512};
  std::size_t at = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    items[i] = {address + at, sizes[i], at / kDigestWord};
    at += sizes[i];
  }
  const DigestKey key = random_digest_key();
  driver.digest(0, key, items, sizes.size(), results, stream);
  wait_for(driver, stream);
  at = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Digest expected =
        digest_on_host(key, {reinterpret_cast<std::uint64_t>(host.data) + at, sizes[i], at / kDigestWord});
    CHECK(results[i] == expected);
    CHECK(results[i].any == expected.any);
    at += sizes[i];
  }
  driver.destroy_stream(0, stream);
  driver.unmap(0, address, bytes);
  driver.release(0, handle, bytes);
  driver.unreserve(0, address, bytes);
}

// bfloat16, float32 and noise: each packed by the driver is unpacked by the reference, and the other way round.
void packing_equals_the_reference(Driver& driver) {
  driver.prepare_packing(0);
  CHECK(driver.has_packing(0));
  constexpr std::size_t kContent = 3 * kMiB / 2 + 48;  // a group that is not full
  const std::size_t granularity = driver.device_info(0).granularity;
  const std::size_t bytes = (6 * kMiB / granularity + 1) * granularity;
  const Address content = driver.reserve(0, bytes);
  const Address packed = content + 2 * kMiB;
  const Handle handle = driver.create(0, bytes);
  driver.map(0, content, bytes, handle);
  driver.allow_access(0, content, bytes, {});
  const Stream stream = driver.create_stream(0);
  HostMemory host(driver, 4 * kMiB);
  HostMemory table(driver, 1 << 16);
  auto* const item = reinterpret_cast<PackItem*>(table.data);
  auto* const result = reinterpret_cast<std::uint64_t*>(table.data + 64);
  auto* const sample = reinterpret_cast<ExponentSample*>(table.data + 4096);
  for (const std::size_t size : {2, 4, 1}) {
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < kContent; ++i) {
      state = state * 1664525u + 1013904223u;
      host.data[i] = static_cast<unsigned char>(state >> 24);
    }
    for (std::size_t i = size - 1; size > 1 && i < kContent; i += size) {
      host.data[i] = static_cast<unsigned char>(0x3c | (host.data[i] & 0x82));
    }
    const std::vector<unsigned char> expected(host.data, host.data + kContent);
    driver.copy_to_device(0, content, host.data, kContent, stream);
    *item = {content, kContent};
    driver.sample(0, item, 1, sample, stream);
    wait_for(driver, stream);
    ExponentSample its_sample;
    sample_on_host(expected.data(), kContent, its_sample);
    CHECK(std::memcmp(sample, &its_sample, sizeof its_sample) == 0);
    PackPlan plan = plan_packing(*sample, kContent).plan;
    CHECK(plan.element_bytes == (size == 1 ? 0 : size));
    if (!plan.worth_it()) plan.element_bytes = 2;
    const std::size_t capacity = 4 * kMiB;
    driver.pack(0, plan, {content, kContent}, {packed, capacity}, result, stream);
    wait_for(driver, stream);
    const std::size_t packed_bytes = *result;
    CHECK(packed_bytes > 0 && packed_bytes <= capacity);
    driver.copy_to_host(0, host.data, packed, packed_bytes, stream);
    driver.fill_zero(0, content, kContent, stream);
    wait_for(driver, stream);
    std::vector<unsigned char> back(kContent);
    CHECK(unpack_on_host(host.data, packed_bytes, back.data(), kContent));
    CHECK(back == expected);
    CHECK(pack_on_host(plan, expected.data(), kContent, host.data, host.bytes) == packed_bytes);
    *result = 0;
    driver.copy_to_device(0, packed, host.data, packed_bytes, stream);
    driver.unpack(0, {packed, packed_bytes}, {content, kContent}, result, stream);
    driver.copy_to_host(0, host.data, content, kContent, stream);
    wait_for(driver, stream);
    CHECK(*result == 0);
    CHECK(std::memcmp(host.data, expected.data(), kContent) == 0);
    // Too little room, and what is not packed.
    driver.pack(0, plan, {content, kContent}, {packed, packed_bytes - 1}, result, stream);
    wait_for(driver, stream);
    CHECK(*result == 0);
    driver.unpack(0, {content, packed_bytes}, {packed, kContent}, result, stream);
    wait_for(driver, stream);
    CHECK(*result == 1);
  }
  driver.destroy_stream(0, stream);
  driver.unmap(0, content, bytes);
  driver.release(0, handle, bytes);
  driver.unreserve(0, content, bytes);
}

void failures_come_as_planned(FaultyDriver& driver) {
  driver.fail("create", 2, ErrorKind::out_of_device_memory, 1);
  const std::size_t bytes = driver.device_info(0).granularity;
  const Handle first = driver.create(0, bytes);
  CHECK_THROWS(driver.create(0, bytes), ErrorKind::out_of_device_memory);
  const Handle third = driver.create(0, bytes);
  driver.fail("release", 1, ErrorKind::driver, 2);
  CHECK_THROWS(driver.release(0, first, bytes), ErrorKind::driver);
  driver.heal();
  driver.release(0, first, bytes);
  driver.release(0, third, bytes);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "host";
  std::unique_ptr<Driver> driver;
  if (name == "cuda") {
    driver = open_cuda_driver();
  } else {
    driver = open_host_driver({}, 64 * kMiB);
  }
  FaultyDriver* faulty = nullptr;
  if (name == "faulty") {
    auto wrapped = std::make_unique<FaultyDriver>(std::move(driver));
    faulty = wrapped.get();
    driver = std::move(wrapped);
  }
  device_is_described(*driver);
  memory_goes_behind_an_address_and_away(*driver);
  memory_is_shared(*driver);
  too_much_is_out_of_memory(*driver);
  stacks_are_given_back(*driver);
  new_memory_is_zero(*driver);
  streams_are_ordered_by_events(*driver);
  digests_equal_the_reference(*driver);
  packing_equals_the_reference(*driver);
  if (faulty != nullptr) failures_come_as_planned(*faulty);
  std::printf("%s: the contract holds\n", name.c_str());
  return 0;
}
