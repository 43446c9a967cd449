#include <array>
#include <tuple>

#include "backup/digest_queue.hpp"
#include "driver/cuda.hpp"
#include "driver/host.hpp"
#include "python/bindings.hpp"

namespace memsaver::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Calls `function` without the GIL and converts its result with it.
template <typename Function>
py::dict dict_of(const Function& function) {
  decltype(function()) result;
  {
    const py::gil_scoped_release no_gil;
    result = function();
  }
  return python::to_dict(result);
}

void bind_constructor(SaverClass& saver, const DriverAdaptor& adapt) {
  saver.def(py::init([adapt](const std::string& driver, const std::vector<std::string>& host_devices,
                             std::size_t host_capacity, std::size_t host_backup_limit, const std::string& file_folder,
                             const std::string& retention, const std::string& verify, bool pack,
                             const std::string& shared_backups, bool peer_access) {
              Settings settings{
                  host_backup_limit,
                  file_folder,
                  parse<Retention>(retention, "retention policy",
                                   {{"keep", Retention::keep}, {"trim", Retention::trim}, {"free", Retention::free}}),
                  parse<VerifyChoice>(verify, "verification",
                                      {{"off", VerifyChoice::off},
                                       {"sampled", VerifyChoice::sampled},
                                       {"full", VerifyChoice::full},
                                       {"auto", VerifyChoice::automatic}}),
                  pack,
                  shared_backups,
                  peer_access};
              auto opened = driver == "cuda" ? open_cuda_driver() : open_host_driver(host_devices, host_capacity);
              if (adapt) opened = adapt(std::move(opened));
              return std::make_shared<Saver>(std::move(opened), std::move(settings));
            }),
            py::kw_only(), "driver"_a, "host_devices"_a = std::vector<std::string>{}, "host_capacity"_a = 0,
            "host_backup_limit"_a = 0, "file_folder"_a = "/tmp", "retention"_a = "keep", "verify"_a = "auto",
            "pack"_a = true, "shared_backups"_a = "", "peer_access"_a = false);
}

py::dict release(Saver& saver, const std::vector<std::string>& tags,
                 const std::vector<std::pair<Address, std::size_t>>& dead,
                 const std::map<std::string, std::string>& overrides) {
  std::vector<RangeSet::Range> ranges;
  ranges.reserve(dead.size());
  for (const auto& [address, bytes] : dead) ranges.push_back({address, bytes});
  std::map<std::string, Restore> policies;
  for (const auto& [tag, restore] : overrides) policies.emplace(tag, parse_restore(restore));
  return dict_of([&] { return saver.release(tags, ranges, policies); });
}

void bind_operations(SaverClass& saver) {
  saver
      .def(
          "allocate",
          [](Saver& self, int device, const std::string& tag, const std::string& restore, std::size_t bytes) {
            return self.allocate({device, tag, parse_restore(restore)}, bytes);
          },
          "device"_a, "tag"_a, "restore"_a, "bytes"_a, NoGil())
      .def("free", &Saver::free, "address"_a, NoGil())
      .def("release", &release, "tags"_a, "dead"_a, "overrides"_a)
      .def(
          "resume",
          [](Saver& self, const std::vector<std::string>& tags) { return dict_of([&] { return self.resume(tags); }); },
          "tags"_a)
      .def("reserve", &Saver::reserve, "tags"_a, NoGil())
      .def("give_back_reserved", &Saver::give_back_reserved, NoGil())
      .def("status", [](Saver& self) { return dict_of([&] { return self.status(); }); })
      .def("prepare_backup", &Saver::prepare_backup, NoGil())
      .def("wait_until_prepared", &Saver::wait_until_prepared, NoGil())
      .def(
          "backup_of",
          [](Saver& self, Address address, std::size_t bytes, Address to) {
            return dict_of([&] { return self.backup_of(address, bytes, reinterpret_cast<void*>(to)); });
          },
          "address"_a, "bytes"_a, "to"_a)
      .def("drop_backups", &Saver::drop_backups, "tags"_a, "keep_memory"_a = false, NoGil())
      .def("trim_backup_memory", &Saver::trim_backup_memory, "at_once"_a = false, NoGil())
      .def("set_file_folder", &Saver::set_file_folder, "folder"_a, NoGil())
      .def("synchronize", &Saver::synchronize, NoGil())
      .def("set_memory_margin", &Saver::set_memory_margin, "bytes"_a)
      .def("known_tags", &Saver::known_tags, NoGil())
      .def("devices", &Saver::devices, NoGil())
      .def("owns", &Saver::owns, "address"_a, NoGil())
      .def("close", &Saver::close, NoGil());
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> digest(Saver& saver, int device, Address address,
                                                               std::size_t bytes,
                                                               const std::array<std::uint64_t, 4>& key) {
  Driver& driver = saver.driver();
  const Stream stream = driver.create_stream(device);
  Digest digest;
  {
    DigestQueue queue(driver, device, {{key[0], key[1], key[2], key[3]}}, stream);
    const std::vector<Extent> extents{{0, bytes}};
    queue.submit({{address, &extents}});
    digest = queue.collect().front();
  }
  driver.destroy_stream(device, stream);
  return {digest.lane0, digest.lane1, digest.any};
}

void bind_driver(SaverClass& saver) {
  saver.def("trim_graph_memory", &Saver::trim_graph_memory, NoGil())
      .def(
          "graph_memory", [](Saver& self, int device) { return self.driver().graph_memory(device); }, "device"_a,
          NoGil())
      .def("accounts",
           [](Saver& self) {
             std::vector<std::pair<int, int>> accounts;
             for (const auto& [file, slot] : self.driver().accounts()) accounts.emplace_back(file, slot);
             return accounts;
           })
      .def("driver_name", [](Saver& self) { return std::string(self.driver().name()); })
      .def("device_count", [](Saver& self) { return self.driver().device_count(); })
      .def(
          "device_info",
          [](Saver& self, int device) { return dict_of([&] { return self.driver().device_info(device); }); },
          "device"_a)
      .def(
          "memory_info",
          [](Saver& self, int device) {
            const MemoryInfo info = self.driver().memory_info(device);
            return std::make_pair(info.free_bytes, info.total_bytes);
          },
          "device"_a, NoGil(), "(free, total) bytes of a device, as the driver tells them now")
      .def("digest", &digest, "device"_a, "address"_a, "bytes"_a, "key"_a, NoGil());
}

}  // namespace

void bind_saver(py::module_& module, const DriverAdaptor& adapt) {
  SaverClass saver(module, "Saver");
  bind_constructor(saver, adapt);
  bind_operations(saver);
  bind_driver(saver);
}

}  // namespace memsaver::python
