#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "vmm/saver.hpp"

namespace memsaver::python {

namespace py = pybind11;
using namespace py::literals;

using SaverClass = py::class_<Saver, std::shared_ptr<Saver>>;

// Returns an adaptor around the driver of a saver; a test build injects faults this way.
using DriverAdaptor = std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver>)>;

// Defines everything in memsaver_core/_native.pyi. Errors become exceptions of memsaver_core.contract.errors; every
// call that may wait releases the GIL.
void bind_all(py::module_& module, const DriverAdaptor& adapt = {});

// Returns the enumerator named `text` in `names`, those of all in their order. Throws configuration if there is none.
template <typename Enum>
Enum parse(const std::string& text, const std::string& what, const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) return static_cast<Enum>(found - names.begin());
  throw Error(ErrorKind::configuration, "unknown " + what + " '" + text + "'; choose one of " + joined(names));
}

}  // namespace memsaver::python
