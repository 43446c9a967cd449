#pragma once

#include <cstddef>
#include <string>

#include "backup/backup_store.hpp"

namespace memsaver {

struct Settings {
  std::size_t host_backup_limit = 0;  // bytes; 0: 80 % of the memory that is available when the saver is made
  std::string file_folder = "/tmp";
  Retention retention = Retention::keep;
  VerifyChoice verify = VerifyChoice::automatic;
  bool peer_access = false;  // let every visible device reach the memory
};

}  // namespace memsaver
