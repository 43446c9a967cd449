// memsaver-hibernate with steps that fail on request.

#include "hibernate/helper.hpp"

#include "faults/faulty_process.hpp"

int main(int count, char** arguments) {
  using namespace memsaver::hibernate;
  const std::string pid = count > 1 ? arguments[1] : "";
  return run_helper({arguments + 1, arguments + count}, [&](std::unique_ptr<Process> process) {
    return std::make_unique<FaultyProcess>(std::move(process), pid);
  });
}
