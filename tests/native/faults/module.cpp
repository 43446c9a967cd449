// memsaver_core._native with a FaultyDriver around the driver of each saver, and functions of Saver that control it and
// check its account.

#include "audit.hpp"
#include "faults/faulty_driver.hpp"
#include "python/bindings.hpp"

namespace py = pybind11;
using namespace memsaver;

namespace {

FaultyDriver& faulty(Saver& saver) { return dynamic_cast<FaultyDriver&>(saver.driver()); }

ErrorKind kind_of(const std::string& name) {
  static const std::map<std::string, ErrorKind> kinds{{"out_of_memory", ErrorKind::out_of_device_memory},
                                                      {"out_of_host_memory", ErrorKind::out_of_host_memory},
                                                      {"invalid_value", ErrorKind::driver},
                                                      {"context_lost", ErrorKind::context_lost}};
  return kinds.at(name);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  python::bind_all(module, [](std::unique_ptr<Driver> driver) -> std::unique_ptr<Driver> {
    return std::make_unique<FaultyDriver>(std::move(driver));
  });
  py::reinterpret_borrow<python::SaverClass>(module.attr("Saver"))
      .def(
          "fail",
          [](Saver& self, const std::string& call, std::size_t nth, const std::string& kind, std::size_t times) {
            faulty(self).fail(call, nth, kind_of(kind), times);
          },
          py::arg("call"), py::arg("nth") = 1, py::arg("kind") = "invalid_value", py::arg("times") = 1)
      .def(
          "delay", [](Saver& self, const std::string& call, double seconds) { faulty(self).delay(call, seconds); },
          py::arg("call"), py::arg("seconds"))
      .def("heal", [](Saver& self) { faulty(self).heal(); })
      .def("counts", [](Saver& self) { return faulty(self).counts(); })
      .def("audit", &audit, py::arg("others") = std::map<int, std::size_t>{}, py::call_guard<py::gil_scoped_release>())
      .def("left_mapped", &left_mapped, py::call_guard<py::gil_scoped_release>());
}
