#include "python/bindings.hpp"

PYBIND11_MODULE(_native, module) { memsaver::python::bind_all(module); }
