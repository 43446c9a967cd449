#include <algorithm>

#include "driver/host_account.hpp"
#include "hibernate/process.hpp"
#include "support/cleanup.hpp"
#include "support/error.hpp"

namespace memsaver::hibernate {

namespace {

// Each step is taken on all devices of the process or on none.
class HostProcess final : public Process {
 public:
  explicit HostProcess(const std::vector<std::string>& accounts) {
    for (const auto& account : accounts) {
      const auto colon = account.find(':');
      if (colon == std::string::npos) throw Error(ErrorKind::configuration, "'" + account + "' is no account");
      accounts_.push_back(
          HostAccount::of_another(std::stoi(account.substr(0, colon)), std::stoi(account.substr(colon + 1))));
    }
  }

  const char* state() override {
    auto worst = HostAccount::State::running;
    for (const auto& account : accounts_) worst = std::max(worst, account->state());
    return name_of(worst);
  }

  // No timeout: calls in flight are short.
  void lock(unsigned) override { all(&HostAccount::lock, &HostAccount::unlock); }
  ByDevice checkpoint(const std::vector<std::string>&) override {
    all(&HostAccount::checkpoint, &HostAccount::restore);
    return {};  // the accounts keep the figures
  }
  void restore(const ByDevice&) override { all(&HostAccount::restore, &HostAccount::checkpoint); }
  void unlock() override { all(&HostAccount::unlock, &HostAccount::lock); }

 private:
  using Step = void (HostAccount::*)();

  void all(Step step, Step undo) {
    Cleanup undo_all;
    for (std::size_t i = 0; i < accounts_.size(); ++i) {
      try {
        (*accounts_[i].*step)();
      } catch (const Error& error) {
        throw StepError(error.call, error.code, std::to_string(i), error.needed_bytes, error.free_bytes);
      }
      undo_all.add([&account = *accounts_[i], undo] { (account.*undo)(); });
    }
    undo_all.dismiss();
  }

  std::vector<std::shared_ptr<HostAccount>> accounts_;
};

}  // namespace

std::unique_ptr<Process> open_host_process(const std::vector<std::string>& accounts) {
  return std::make_unique<HostProcess>(accounts);
}

}  // namespace memsaver::hibernate
