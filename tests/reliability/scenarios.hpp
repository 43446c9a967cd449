#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "companions.hpp"
#include "world.hpp"

namespace memsaver {

// `act` is failed call by call, after `prepare` ran without failures. It may be repeated.
struct Scenario {
  std::string name;
  World::Options options;
  std::function<void(World&)> prepare;
  std::function<void(World&)> act;
  std::function<void(World&)> opposite;  // what else must work after a failure; may be none
  bool without_unnamed_files = false;
};

inline Scenario release_of(std::string name, std::function<void(World&)> prepare, World::Options options = {}) {
  return {std::move(name), std::move(options), std::move(prepare), [](World& world) { world.release(); },
          [](World& world) { world.resume(); }};
}
inline Scenario resume_of(std::string name, std::function<void(World&)> prepare, World::Options options = {}) {
  return {std::move(name), std::move(options),
          [prepare](World& world) {
            prepare(world);
            world.release();
          },
          [](World& world) { world.resume(); }, [](World& world) { world.release(); }};
}

// A call that must be refused. Other errors are the caller's.
inline void refused(World& world, ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind != kind) throw;
    return;
  }
  world.problems.push_back("a call was not refused");
}

// Content that is packed, all but its first blocks.
inline void add_packed(std::vector<Scenario>& list) {
  World::Options weights;
  weights.weights = true;
  weights.settings.verify = VerifyChoice::full;
  for (const Restore restore : {Restore::host, Restore::file}) {
    const std::string name = std::string("packed, ") + name_of(restore);
    const auto fill = [restore](World& world) {
      world.allocate("w", restore, 44);
      world.allocate("z", Restore::zero, 3);
    };
    list.push_back(release_of("release " + name, fill, weights));
    list.push_back(resume_of("resume " + name, fill, weights));
    list.push_back({"release again, changed, " + name, weights,
                    [fill](World& world) {
                      fill(world);
                      world.release();
                      world.check_packed("w");
                      world.resume();
                      world.rewrite(0, 25, 12);
                    },
                    [](World& world) { world.release(); }, [](World& world) { world.resume(); }});
    list.push_back({"resume, reserved, " + name, weights,
                    [fill](World& world) {
                      fill(world);
                      world.release();
                      world.check_packed("w");
                    },
                    [](World& world) {
                      world.reserve();
                      world.resume();
                    },
                    [](World& world) { world.resume(); }});
    // What is packed takes the whole of what is resumed, so there is no room to unpack in.
    list.push_back({"resume without room, " + name, weights,
                    [restore](World& world) {
                      world.allocate("w", restore, 24);
                      world.allocate("w", restore, 10);
                      world.release();
                      world.check_packed("w");
                      world.resume();
                      world.free(0);
                      world.release();
                    },
                    [](World& world) { world.resume(); }, [](World& world) { world.release(); }});
  }
  // Memory to pack in is taken twice: when a little was unmapped, and when there is room for all of it.
  list.push_back(release_of(
      "release packed, more and more room", [](World& world) { world.allocate("w", Restore::host, 100); }, weights));
  list.push_back({"backups read, packed", weights,
                  [](World& world) {
                    world.allocate("w", Restore::host, 40);
                    world.release();
                    world.check_packed("w");
                  },
                  [](World& world) {
                    world.read_backups();
                    world.resume();
                    world.read_backups();
                  },
                  [](World& world) { world.resume(); }});
}

// Packed content in a store that two other processes use, which keep the same.
inline void add_shared_by_three(std::vector<Scenario>& list) {
  const World::Options options = Companions::options();
  const auto fill = [](World& world) {
    Companions::fill(world);
    world.allocate("z", Restore::zero, 3);
  };
  list.push_back(release_of("release of what others keep", fill, options));
  list.push_back(resume_of("resume of what others wrote", fill, options));
  list.push_back({"brought in from what others wrote", options,
                  [](World& world) {
                    Companions::fill(world);
                    world.release();
                    world.leave_in_store(0);
                  },
                  [](World& world) {
                    world.take_from_store(0);
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  list.push_back(release_of(
      "release of content that others keep, changed",
      [fill](World& world) {
        fill(world);
        world.release();
        world.resume();
        world.rewrite(0, 25, 12);
      },
      options));
}

// Content that is written while it is released: raw or packed, in a store or not, some of it zeros before.
inline void add_written_asleep(std::vector<Scenario>& list) {
  for (const bool weights : {false, true}) {
    for (const bool shared : {false, true}) {
      World::Options options;
      options.weights = weights;
      options.settings.verify = VerifyChoice::full;
      if (shared) options.settings.shared_backups = "written-asleep-" + std::to_string(getpid());
      list.push_back({std::string("written asleep") + (weights ? ", packed" : "") + (shared ? ", shared" : ""), options,
                      [weights](World& world) {
                        world.allocate("w", Restore::host, 44);
                        world.allocate("w", Restore::host, 5);
                        world.write_zeros(1);
                        world.release();
                        if (weights) world.check_packed("w");
                      },
                      [](World& world) {
                        world.write_asleep({0, 1});
                        world.read_backups();
                        world.write_asleep({1});
                        world.read_backups();
                      },
                      [](World& world) { world.resume(); }});
    }
  }
}

inline std::vector<Scenario> scenarios() {
  std::vector<Scenario> list;
  const auto nothing = [](World&) {};
  // A small allocation, one of several blocks and chunks, and another of several blocks behind it.
  const auto fill = [](Restore restore) {
    return [restore](World& world) {
      world.allocate("t", restore, 3);
      world.allocate("t", restore, 34);
      world.allocate("u", restore, 5);
    };
  };
  const auto every_policy = [](World& world) {
    world.allocate("a-scratch", Restore::discard, 6);
    world.allocate("cache", Restore::zero, 9);
    world.allocate("disk", Restore::file, 11);
    world.allocate("weights", Restore::host, 20);
    world.allocate("weights", Restore::host, 1);
  };
  World::Options two_devices;
  two_devices.devices = 2;
  two_devices.settings.verify = VerifyChoice::full;
  World::Options full;
  full.settings.verify = VerifyChoice::full;

  const auto named_files = [](World& world) {
    // What a process left that was killed before it took the name away.
    const std::string left_behind = World::file_folder + "/memsaver-backup-000000";
    close(open(left_behind.c_str(), O_CREAT | O_WRONLY, 0600));
    world.allocate("disk", Restore::file, 11);
  };
  World::Options shared = full;
  shared.settings.shared_backups = "every-call-" + std::to_string(getpid());
  list.push_back(release_of("release into a shared store", every_policy, shared));
  list.push_back(resume_of("resume from a shared store", every_policy, shared));
  list.push_back(release_of(
      "release of changed content into a shared store",
      [every_policy](World& world) {
        every_policy(world);
        world.release();
        world.resume();
        world.rewrite_what_is_here();
      },
      shared));
  list.push_back({"allocate", {}, nothing, [](World& world) { world.allocate("t", Restore::zero, 3); }, {}});
  list.push_back(
      {"allocate kept, several chunks", {}, nothing, [](World& world) { world.allocate("t", Restore::host, 50); }, {}});
  list.push_back({"allocate under a released tag",
                  {},
                  [](World& world) {
                    world.allocate("t", Restore::host, 6);
                    world.release();
                  },
                  [](World& world) { world.allocate("t", Restore::host, 6); },
                  [](World& world) { world.resume(); }});
  list.push_back({"allocate twice, one device each",
                  two_devices,
                  nothing,
                  [](World& world) {
                    world.allocate("t", Restore::host, 3, 0);
                    world.allocate("t", Restore::host, 3, 1);
                  },
                  {}});
  list.push_back(
      {"free", {}, fill(Restore::host), [](World& world) { world.free(1); }, [](World& world) { world.release(); }});
  list.push_back({"free inside of a shared chunk, then the rest of it",
                  {},
                  [](World& world) {
                    for (int i = 0; i < 4; ++i) world.allocate("t", Restore::discard, 2);
                    world.release();
                    world.resume();
                  },
                  [](World& world) {
                    for (const std::size_t number : {1u, 2u, 0u, 3u}) world.free(number);
                  },
                  [](World& world) { world.allocate("t", Restore::discard, 2); }});
  list.push_back({"free while released",
                  {},
                  [](World& world) {
                    world.allocate("t", Restore::host, 6);
                    world.allocate("t", Restore::file, 6);
                    world.allocate("t", Restore::host, 6);
                    world.release();
                  },
                  [](World& world) {
                    world.free(0);
                    world.free(1);
                  },
                  [](World& world) { world.resume(); }});
  for (const Restore restore : {Restore::discard, Restore::zero, Restore::host, Restore::file}) {
    list.push_back(release_of(std::string("release, ") + name_of(restore), fill(restore)));
    list.push_back(resume_of(std::string("resume, ") + name_of(restore), fill(restore), full));
  }
  list.push_back(release_of("release, every policy", every_policy));
  list.push_back(release_of("release to a file that has a name at first", named_files));
  list.back().without_unnamed_files = true;
  list.push_back(resume_of("resume, every policy", every_policy, full));
  const auto on_two = [](World& world) {
    for (const int device : {0, 1}) {
      world.allocate("weights", Restore::host, 14, device);
      world.allocate("cache", Restore::zero, 3, device);
      world.allocate("disk", Restore::file, 6, device);
    }
  };
  list.push_back(release_of("release, two devices", on_two, two_devices));
  list.push_back(resume_of("resume, two devices", on_two, two_devices));
  const auto released_on_two = [on_two](World& world) {
    on_two(world);
    world.release();
  };
  list.push_back({"reserve, two devices", two_devices, released_on_two,
                  [](World& world) {
                    world.reserve();
                    world.reserve();  // in place of the first
                    world.saver->give_back_reserved();
                    world.reserve();
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"resume, reserved, two devices", two_devices,
                  [released_on_two](World& world) {
                    released_on_two(world);
                    world.reserve();
                  },
                  [](World& world) { world.resume(); }, [](World& world) { world.release(); }});
  list.push_back({"release of one tag after another",
                  {},
                  every_policy,
                  [](World& world) {
                    world.release({"cache"});
                    world.release({"weights"});
                    world.release();
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"resume of one tag after another", full,
                  [every_policy](World& world) {
                    every_policy(world);
                    world.release();
                  },
                  [](World& world) {
                    world.resume({"weights"});
                    world.resume({"cache", "disk"});
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  // A CUDA graph's pool is memory under its own tag. Its content is kept, because replays read what the capture wrote
  // and write to it; or it is discarded, and the graph with it.
  const auto captured = [](World& world) {
    for (const int device : {0, 1}) {
      world.allocate("weights", Restore::host, 3, device);
      world.allocate("cuda_graph", Restore::host, 6, device);
      world.allocate("kv_cache", Restore::zero, 2, device);
    }
    world.release();
    world.resume();
    for (const std::size_t pool : {1u, 4u}) world.rewrite(pool, 2, 3);
  };
  list.push_back(release_of("release, graphs", captured, two_devices));
  list.push_back(resume_of("resume, graphs", captured, two_devices));
  list.push_back({"graphs alone, then what they read", two_devices, captured,
                  [](World& world) {
                    world.release({"cuda_graph"});
                    world.resume({"cuda_graph"});
                    for (const std::size_t pool : {1u, 4u}) world.rewrite(pool, 0, 2);
                    world.release({"cuda_graph", "kv_cache"});
                    world.resume({"kv_cache"});
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  list.push_back({"graphs given up", two_devices, captured,
                  [](World& world) {
                    world.release({}, {{"cuda_graph", Restore::discard}});
                    world.saver->trim_graph_memory();
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  // Another policy for one release.
  const std::vector<std::pair<Restore, Restore>> overrides = {
      {Restore::host, Restore::discard}, {Restore::host, Restore::zero}, {Restore::host, Restore::file},
      {Restore::file, Restore::host},    {Restore::zero, Restore::host}, {Restore::discard, Restore::zero}};
  for (const auto& [usual, now] : overrides) {
    for (const bool unchanged : {false, true}) {
      if (unchanged && !keeps_content(usual)) continue;
      // What is in blocks of zeros needs no room.
      const std::size_t in_host = now != Restore::host ? 0 : usual == Restore::zero ? 12 : 20;
      const std::size_t in_file = now == Restore::file ? 20 : 0;
      list.push_back(
          {std::string("override ") + name_of(usual) + " by " + name_of(now) + (unchanged ? ", unchanged" : ""), full,
           [usual = usual, unchanged](World& world) {
             world.allocate("t", usual, 20);
             world.release();
             world.resume();
             if (!unchanged) world.rewrite(0, 2, 9);
           },
           [now = now, in_host, in_file](World& world) {
             world.release({}, {{"t", now}});
             world.check_kept(in_host, in_file);
             world.resume();
           },
           [](World& world) { world.release(); }});
    }
  }
  list.push_back({"released in two parts under two policies", full,
                  [](World& world) {
                    world.allocate("t", Restore::zero, 6);
                    world.release();
                    world.allocate("t", Restore::zero, 6);
                  },
                  [](World& world) {
                    world.release({}, {{"t", Restore::host}});
                    world.resume();
                  },
                  [](World& world) { world.release({}, {{"t", Restore::discard}}); }});
  World::Options unverified;
  unverified.settings.verify = VerifyChoice::off;
  for (const auto& [name, options] : {std::pair("released in two parts, kept first", full),
                                      std::pair("released in two parts, kept first, unverified", unverified)}) {
    list.push_back({name, options,
                    [](World& world) {
                      world.allocate("t", Restore::host, 10);
                      world.release();
                      world.allocate("t", Restore::host, 10);
                    },
                    [](World& world) {
                      world.release({}, {{"t", Restore::zero}});
                      world.resume();
                    },
                    [](World& world) { world.release({}, {{"t", Restore::discard}}); }});
  }
  // What an earlier cycle left: equal content, changed content, holes, a failure.
  list.push_back(release_of("release, content unchanged", [](World& world) {
    world.allocate("t", Restore::host, 20);
    world.allocate("f", Restore::file, 20);
    world.release();
    world.resume();
  }));
  list.push_back(release_of("release, content changed in part", [](World& world) {
    world.allocate("t", Restore::host, 20);
    world.allocate("f", Restore::file, 20);
    world.release();
    world.resume();
    world.rewrite(0, 3, 6);
    world.rewrite(1, 3, 6);
  }));
  const auto with_zeros = [](World& world) {
    world.allocate("t", Restore::host, 10);
    const std::size_t zeros = world.allocate("t", Restore::host, 10);
    world.write_zeros(zeros);
    const std::size_t file = world.allocate("f", Restore::file, 12);
    world.mark_dead(0, 2, 3);
    world.mark_dead(file, 1, 6);
  };
  list.push_back(release_of("release, dead ranges and zeros", with_zeros));
  list.push_back(resume_of("resume, dead ranges and zeros", with_zeros, full));
  const auto churned = [](Restore restore) {
    return [restore](World& world) {
      for (int i = 0; i < 8; ++i) world.allocate("t", restore, 2);
      world.release();
      world.resume();
      for (const std::size_t number : {1u, 2u, 5u}) world.free(number);
      world.allocate("t", restore, 2);
      world.allocate("t", restore, 12);
    };
  };
  list.push_back(release_of("release, churned, kept", churned(Restore::host)));
  list.push_back(resume_of("resume, churned, kept", churned(Restore::host), full));
  list.push_back(release_of("release, churned, discarded", churned(Restore::discard)));
  // A partial release whose border lies inside an allocation, at the former border of two freed ones.
  const auto half_released = [](Restore restore) {
    return [restore](World& world) {
      for (const std::size_t pages : {3u, 3u, 6u, 34u}) world.allocate("t", restore, pages);
      world.release();
      world.resume();
      for (const std::size_t number : {1u, 2u}) world.free(number);
      world.allocate("t", restore, 9);
      world.rewrite(0, 0, 3);
      world.rewrite(3, 0, 34);
      world.faulty->fail("unmap", 2, ErrorKind::driver, 1);
      world.faulty->fail("create", 1, ErrorKind::driver, std::size_t{1} << 40);  // nor can it be undone
      world.undo_may_fail = true;
      refused(world, ErrorKind::driver, [&] { world.release(); });
      world.undo_may_fail = false;
      world.faulty->heal();
    };
  };
  constexpr Restore policies[] = {Restore::discard, Restore::zero, Restore::host, Restore::file};
  for (const Restore usual : policies) {
    list.push_back(release_of(std::string("half released, ") + name_of(usual), half_released(usual)));
    list.push_back({std::string("half released, ") + name_of(usual) + ", the rest written to, and resumed", full,
                    half_released(usual),
                    [](World& world) {
                      world.rewrite_what_is_here();
                      world.resume();
                    },
                    [](World& world) { world.release(); }});
    for (const Restore now : policies) {
      list.push_back({std::string("half released, ") + name_of(usual) + ", the rest under " + name_of(now), full,
                      half_released(usual),
                      [now](World& world) {
                        world.release({}, {{"t", now}});
                        world.resume();
                      },
                      [](World& world) { world.resume(); }});
    }
  }
  // A part of a tag goes and comes back.
  const auto caches = [](World& world) {
    for (const int device : {0, 1}) {
      world.allocate("cache", Restore::zero, 24, device, 4);
      world.allocate("cache", Restore::host, 16, device, 4);
      world.allocate("weights", Restore::host, 5, device);
    }
  };
  const auto shrunk = [caches](World& world) {
    caches(world);
    world.release({"cache"});
    world.resume({"cache"});
    world.resize("cache", 0.5);
  };
  const auto grow = [](World& world) { world.resize("cache", 1); };
  const auto shrink = [](World& world) { world.resize("cache", 0.5); };
  list.push_back({"shrink", two_devices, caches, shrink, grow});
  list.push_back({"grow", two_devices, shrunk, grow, shrink});
  list.push_back({"shrink and grow at once", two_devices, shrunk, [](World& world) { world.resize("cache", 1, 8); },
                  [](World& world) {
                    world.release();
                    world.resume();
                  }});
  list.push_back({"released and resumed while shrunk", two_devices, shrunk,
                  [grow](World& world) {
                    world.release();
                    world.resume();
                    grow(world);
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"resized while released", two_devices, caches,
                  [shrink, grow](World& world) {
                    world.release();
                    shrink(world);
                    world.resume();
                    world.release();
                    grow(world);
                    world.resume();
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"freed while shrunk", two_devices, shrunk,
                  [](World& world) {
                    for (const std::size_t number : {0u, 1u, 2u}) world.free(number);
                  },
                  grow});
  for (const Retention retention : {Retention::trim, Retention::free}) {
    World::Options options;
    options.settings.retention = retention;
    const auto two_tags = [](World& world) {
      world.allocate("t", Restore::host, 20);
      world.allocate("z", Restore::zero, 2);
    };
    const std::string name = retention == Retention::trim ? "trim" : "free";
    list.push_back(resume_of("resume, " + name, two_tags, options));
    list.push_back({"operations close behind each other, " + name, options, two_tags,
                    [](World& world) {
                      world.release();
                      world.resume();
                      world.release({"t"});
                      world.resume();
                    },
                    [](World& world) { world.release(); }});
  }
  for (const VerifyChoice verify : {VerifyChoice::off, VerifyChoice::sampled}) {
    World::Options options;
    options.settings.verify = verify;
    list.push_back(
        resume_of(verify == VerifyChoice::off ? "resume, unverified" : "resume, sampled", every_policy, options));
  }
  list.push_back({"prepare, then release",
                  {},
                  fill(Restore::host),
                  [](World& world) {
                    world.prepare_backup();
                    world.release();
                  },
                  [](World& world) { world.resume(); }});
  // A device without digests: everything is copied each time, and nothing compared.
  World::Options without_digests = full;
  without_digests.digests = false;
  const auto resumed_before = [every_policy](World& world) {
    every_policy(world);
    world.release();
    world.resume();
  };
  list.push_back(release_of("release, no digests", resumed_before, without_digests));
  list.push_back(resume_of("resume, no digests", resumed_before, without_digests));

  // Little host memory. Transfers to and from a file need one block of it temporarily, within the limit or not.
  const auto limited = [](std::size_t pages, int devices = 1) {
    World::Options options;
    options.devices = devices;
    options.settings.verify = VerifyChoice::full;
    options.settings.host_backup_limit = pages * kPage;
    return options;
  };
  const auto limit_filled = [](World& world) {
    world.allocate("disk", Restore::file, 18);
    world.allocate("weights", Restore::host, 20);
    world.release({"disk"});
    world.release({"weights"});
  };
  list.push_back({"resume, a file, and the limit filled by others", limited(20), limit_filled,
                  [](World& world) { world.resume(); }, [](World& world) { world.resume({"disk"}); }});
  list.push_back({"release, a file, and the limit filled by others", limited(20),
                  [limit_filled](World& world) {
                    limit_filled(world);
                    world.resume({"disk"});
                    world.rewrite(0, 0, 18);
                  },
                  [](World& world) { world.release(); }, [](World& world) { world.resume(); }});
  const auto large_file = [](World& world) { world.allocate("disk", Restore::file, 45); };
  list.push_back(release_of("release, a file far beyond the limit", large_file, limited(9)));
  list.push_back(resume_of("resume, a file far beyond the limit", large_file, limited(9)));
  const auto on_each_device = [](World& world) {
    for (const int device : {0, 1}) world.allocate("disk", Restore::file, 14, device);
  };
  list.push_back(release_of("release, files beyond the limit of a page", on_each_device, limited(1, 2)));
  list.push_back(resume_of("resume, files beyond the limit of a page", on_each_device, limited(1, 2)));
  list.push_back({"a release beyond the limit, then to a file", limited(10),
                  [](World& world) { world.allocate("t", Restore::file, 20); },
                  [](World& world) {
                    if (world.released_pages(Restore::file) == 0) {
                      refused(world, ErrorKind::out_of_host_memory, [&] { world.release({}, {{"t", Restore::host}}); });
                      if (world.released_pages(Restore::file) != 0) {
                        world.problems.push_back("memory went although its content did not fit");
                      }
                    }
                    world.release();
                    world.resume();
                  },
                  [](World& world) { world.release({}, {{"t", Restore::zero}}); }});
  // Memory that a block frees counts as room for the same block.
  const auto one_page_dead_in_each_block = [](World& world) {
    for (std::size_t page = 0; page < 32; page += kBlockBytes / kPage) world.mark_dead(0, page, 1);
  };
  list.push_back(release_of(
      "release, content shrunk, little room",
      [one_page_dead_in_each_block](World& world) {
        world.allocate("t", Restore::host, 32);
        world.release();
        world.resume();
        one_page_dead_in_each_block(world);
      },
      limited(40)));
  list.push_back(release_of(
      "release, content grown, little room",
      [one_page_dead_in_each_block](World& world) {
        world.allocate("t", Restore::host, 32);
        one_page_dead_in_each_block(world);
        world.release();
        world.resume();
        world.mark_nothing_dead();
        world.rewrite(0, 0, 32);
      },
      limited(32)));

  // A damaged backup: an override that discards its content resolves it.
  for (const Restore usual : {Restore::host, Restore::file}) {
    for (const Restore now : {Restore::discard, Restore::zero}) {
      list.push_back({std::string("a damaged backup, ") + name_of(usual) + ", given up as " + name_of(now), full,
                      [usual](World& world) {
                        world.allocate("t", usual, 9);
                        world.allocate("u", usual == Restore::host ? Restore::file : Restore::host, 3);
                        world.release();
                        world.damage_backup(0);
                        refused(world, ErrorKind::backup, [&] { world.resume({"t"}); });
                        world.release();  // says nothing new of what is released
                        refused(world, ErrorKind::backup, [&] { world.resume({"t"}); });
                      },
                      [now](World& world) {
                        world.release({"t"}, {{"t", now}});
                        world.resume({"t"});
                      },
                      [](World& world) {
                        world.release({"t"}, {{"t", Restore::zero}});
                        world.resume();
                      }});
    }
  }

  // The driver refuses to unmap a range: only this range is blocked.
  const auto let_go_and_resume = [](World& world) {
    world.ledger->let_go();
    world.resume();
  };
  list.push_back({"a range that is held after a failed resume", two_devices,
                  [](World& world) {
                    world.allocate("t", Restore::host, 6);
                    world.allocate("u", Restore::zero, 5);
                    world.allocate("v", Restore::host, 5, 1);
                    world.release();
                    world.faulty->fail("copy_to_device", 1, ErrorKind::driver, 1);
                    world.ledger->refuse_unmaps(1);
                    refused(world, ErrorKind::driver, [&] { world.resume({"t"}); });
                    world.faulty->heal();
                  },
                  [](World& world) {
                    world.resume({"u"});
                    world.resume({"v"});
                    world.free(world.allocate("w", Restore::host, 3));
                    world.release({"u", "v"});
                    world.ledger->let_go();
                    world.resume();
                  },
                  let_go_and_resume});
  list.push_back({"a range that is held after a failed allocation", two_devices,
                  [](World& world) {
                    world.allocate("u", Restore::host, 5);
                    world.faulty->fail("allow_access", 1, ErrorKind::driver, 1);
                    world.ledger->refuse_unmaps(1);
                    refused(world, ErrorKind::driver, [&] { world.allocate("t", Restore::zero, 3); });
                    world.faulty->heal();
                  },
                  [](World& world) {
                    world.allocate("t", Restore::zero, 2);
                    world.allocate("v", Restore::host, 3, 1);
                    world.release({"u", "v"});
                    world.resume({"u", "v"});
                    world.ledger->let_go();
                    world.allocate("t", Restore::zero, 2);
                  },
                  let_go_and_resume});
  list.push_back({"a range that is held in a release", two_devices,
                  [](World& world) {
                    world.allocate("t", Restore::zero, 3);
                    world.allocate("u", Restore::host, 5);
                    world.allocate("v", Restore::host, 5, 1);
                    world.ledger->refuse_unmaps(1);
                    refused(world, ErrorKind::driver, [&] { world.release({"t"}); });
                  },
                  [](World& world) {
                    world.release({"u", "v"});
                    world.resume({"u"});
                    world.ledger->let_go();
                    world.release();
                    world.resume();
                  },
                  let_go_and_resume});

  // Buffers of several processes, here of one.
  const auto share = [](World& world) { world.share(3); };
  const auto take_away = [](World& world) { world.take_shared_away(); };
  const auto bring_back = [](World& world) { world.bring_shared_back(); };
  list.push_back({"shared, made", {}, nothing, share, {}});
  list.push_back({"shared, taken away", {}, share, take_away, bring_back});
  list.push_back({"shared, brought back",
                  {},
                  [](World& world) {
                    world.share(3);
                    world.take_shared_away();
                  },
                  bring_back,
                  take_away});

  list.push_back({"allocate, a margin of memory",
                  {},
                  [](World& world) { world.saver->set_memory_margin(std::size_t{2} << 20); },
                  [](World& world) {
                    world.allocate("t", Restore::host, 10);
                    refused(world, ErrorKind::out_of_device_memory, [&] { world.allocate("t", Restore::zero, 600); });
                  },
                  [](World& world) { world.release(); }});
  const auto two_back = [](World& world) {
    world.allocate("t", Restore::host, 18);
    world.allocate("f", Restore::file, 6);
    world.allocate("u", Restore::host, 5);
    world.release();
    world.resume({"t", "f"});
  };
  list.push_back({"backups dropped", full, two_back,
                  [](World& world) {
                    world.saver->drop_backups({});
                    world.check_kept(world.released_pages(Restore::host), world.released_pages(Restore::file));
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  list.push_back({"backups read", full,
                  [with_zeros](World& world) {
                    with_zeros(world);
                    world.release();
                  },
                  [](World& world) {
                    world.read_backups();
                    world.resume();
                    world.read_backups();
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"files in another folder", full, two_back,
                  [](World& world) {
                    world.saver->set_file_folder(World::other_folder);
                    world.release();
                    refused(world, ErrorKind::configuration, [&] { world.saver->set_file_folder(World::file_folder); });
                    world.resume();
                    world.saver->set_file_folder(World::file_folder);
                  },
                  [](World& world) { world.release(); }});
  add_packed(list);
  add_written_asleep(list);
  add_shared_by_three(list);
  return list;
}

}  // namespace memsaver
