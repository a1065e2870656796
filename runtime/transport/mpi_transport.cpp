// Owns the Transport of one MPI rank: the contract in terms of the engine and MPI's non-blocking calls.
#include "runtime/transport/mpi_transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <climits>
#include <numeric>

#include "runtime/launch/launch.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"
#include "runtime/transport/group_transport.h"
#include "runtime/transport/mpi_engine.h"
#include "runtime/watch/alarm.h"

namespace smp::runtime::mpi {
namespace {

std::atomic<bool> owns_mpi = false;  // MPI is the process's, and so is who initialised it

// For one of MPI's own calls that all ranks have come to, on a busy machine.
constexpr std::chrono::milliseconds kLeastLimit = std::chrono::seconds(60);

Alarm end_of_waiting(Engine& engine, const char* what) {
  const auto limit = std::max(engine.watch().timeout(), kLeastLimit);
  return {limit,
          ending_with(c10::str("[rank ", engine.world_rank(), "] expected MPI to ", what, " within ", limit.count() / 1000,
                               " s, got no answer of it: another rank or mpirun is stopped, or a host cannot be reached. ",
                               "timeout_s decides how long ranks wait."))};
}

class MpiTransport final : public GroupTransport {
 public:
  MpiTransport(std::shared_ptr<Engine> engine, MPI_Comm comm, std::vector<int> members, int rank)
      : GroupTransport(std::move(members), rank), engine_(std::move(engine)), comm_(comm) {}

  Engine& engine() { return *engine_; }

  Request isend(int dest, int tag, const DeviceMemory& from) override {
    check_host_memory("isend", from);
    check_message("isend", dest, size(), tag, from.num_bytes);
    return engine_->isend(comm_, dest, world_rank(dest), tag, from.data, from.num_bytes);
  }
  Request irecv(int source, int tag, const DeviceMemory& into) override {
    check_host_memory("irecv", into);
    check_message("irecv", source, size(), tag, into.num_bytes);
    return engine_->irecv(comm_, source, world_rank(source), tag, into.data, into.num_bytes);
  }
  void progress() override { engine_->progress(); }

  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override;
  void end_group() override {
    engine_->watch().throw_if_failed();
    mpi_check(MPI_Comm_free(&comm_), "MPI_Comm_free");
  }
  void broadcast(const DeviceMemory& bytes, int root) override;
  std::vector<std::string> all_gather(std::string_view bytes) override;
  void barrier() override {
    start("barrier", [&](MPI_Request* request) { return MPI_Ibarrier(comm_, request); });
  }

  void set_timeout(std::chrono::milliseconds timeout) override { engine_->watch().set_timeout(timeout); }
  void describe_by(const std::function<std::string()>& doing) override { engine_->watch().describe_by(doing); }
  void do_beside(const std::function<void()>& move) override { engine_->watch().do_beside(move); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    const auto is_done_now = [&] {
      engine_->progress();
      return is_done();
    };
    engine_->watch().wait_until(is_done_now, where);
  }
  bool abort(std::string_view message) noexcept override { return engine_->watch().abort(message); }
  void end_in_order() noexcept override { engine_->watch().end_in_order(); }

 private:
  // Starts a collective and waits for it. After a failure MPI goes on with it whenever it is called.
  template <class Start>
  void start(const std::string& operation, const Start& call) {
    engine_->watch().throw_if_failed();
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_check(call(&request), operation.c_str());
    engine_->wait(request, operation);
  }

  // MPI_Comm_create_group blocks without end, so nobody enters it before all members are there.
  void meet_members(const std::vector<int>& members, int my_index);

  std::shared_ptr<Engine> engine_;
  MPI_Comm comm_;
};

void MpiTransport::meet_members(const std::vector<int>& members, int my_index) {
  uint32_t hash = 0;  // members that were called with different lists never meet
  for (const int member : members) hash = hash * 31 + static_cast<uint32_t>(member) + 1;
  const int tag = static_cast<int>(hash % static_cast<uint32_t>(kMaxTag));
  const std::string action = "group of " + std::to_string(members.size()) + " ranks";
  const auto send = [&](int peer) { return engine_->isend(engine_->control(), peer, peer, tag, nullptr, 0); };
  const auto receive = [&](int peer) { engine_->irecv(engine_->control(), peer, peer, tag, nullptr, 0).wait(action); };
  if (my_index > 0) {
    send(members.front()).wait(action);
    receive(members.front());
    return;
  }
  for (size_t i = 1; i < members.size(); ++i) receive(members[i]);
  for (size_t i = 1; i < members.size(); ++i) send(members[i]).wait(action);
}

std::shared_ptr<Transport> MpiTransport::group(const std::vector<int>& ranks) {
  const int my_index = check_group(ranks, rank(), size());
  std::vector<int> members = world_ranks(ranks);
  meet_members(members, my_index);

  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  mpi_check(MPI_Comm_group(engine_->world(), &world), "MPI_Comm_group");
  mpi_check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group), "MPI_Group_incl");
  {
    const Alarm end = end_of_waiting(*engine_, "make a group");
    mpi_check(MPI_Comm_create_group(engine_->world(), group, 0, &comm), "MPI_Comm_create_group");
  }
  mpi_check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Group_free(&group), "MPI_Group_free");
  mpi_check(MPI_Group_free(&world), "MPI_Group_free");
  return std::make_shared<MpiTransport>(engine_, comm, std::move(members), my_index);
}

void MpiTransport::broadcast(const DeviceMemory& bytes, int root) {
  check_host_memory("broadcast", bytes);
  check_message("broadcast", root, size(), 0, bytes.num_bytes);
  const std::string operation =
      "broadcast of " + std::to_string(bytes.num_bytes) + " bytes from rank " + std::to_string(world_rank(root));
  for (int64_t offset = 0; offset < bytes.num_bytes; offset += kPartBytes) {
    const auto count = static_cast<int>(std::min(kPartBytes, bytes.num_bytes - offset));
    start(operation, [&](MPI_Request* request) {
      return MPI_Ibcast(static_cast<char*>(bytes.data) + offset, count, MPI_BYTE, root, comm_, request);
    });
  }
}

struct GatherBuffers {
  int64_t my_length;
  std::string mine;
  std::vector<int64_t> lengths;  // by rank
  std::vector<int> counts{}, starts{};
  std::string all{};
};

std::vector<std::string> MpiTransport::all_gather(std::string_view bytes) {
  const auto num_ranks = static_cast<size_t>(size());
  const auto own = std::make_shared<GatherBuffers>(GatherBuffers{.my_length = static_cast<int64_t>(bytes.size()),
                                                                 .mine = std::string(bytes),
                                                                 .lengths = std::vector<int64_t>(num_ranks)});
  return keeping(own, [&] {
    start("all_gather of lengths", [&](MPI_Request* request) {
      return MPI_Iallgather(&own->my_length, 1, MPI_INT64_T, own->lengths.data(), 1, MPI_INT64_T, comm_, request);
    });
    const int64_t total = std::accumulate(own->lengths.begin(), own->lengths.end(), int64_t{0});
    TORCH_CHECK_VALUE(total <= INT_MAX, "all_gather: expected at most ", INT_MAX, " bytes of all ranks together, got ",
                      total, ". Send what is that large from rank to rank, or gather it in parts.");
    own->counts.assign(own->lengths.begin(), own->lengths.end());
    own->starts.resize(num_ranks);
    std::exclusive_scan(own->counts.begin(), own->counts.end(), own->starts.begin(), 0);
    own->all.resize(static_cast<size_t>(total));
    start("all_gather", [&](MPI_Request* request) {
      return MPI_Iallgatherv(own->mine.data(), own->counts[static_cast<size_t>(rank())], MPI_BYTE, own->all.data(),
                             own->counts.data(), own->starts.data(), MPI_BYTE, comm_, request);
    });
    std::vector<std::string> gathered;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      gathered.push_back(own->all.substr(static_cast<size_t>(own->starts[rank]), static_cast<size_t>(own->counts[rank])));
    }
    return gathered;
  });
}

void initialise_mpi() {
  int is_finalized = 0;
  mpi_check(MPI_Finalized(&is_finalized), "MPI_Finalized");
  if (is_finalized != 0) throw CommError("mpi transport: expected MPI that runs, but this process has finalised it");
  int is_initialized = 0;
  mpi_check(MPI_Initialized(&is_initialized), "MPI_Initialized");
  if (is_initialized != 0) return;
  set_mpi_defaults(detect_launch());
  int provided = MPI_THREAD_SINGLE;
  mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  owns_mpi = true;
  if (provided < MPI_THREAD_FUNNELED)
    throw CommError("mpi transport: expected an MPI that allows threads, this one does not");
}

}  // namespace

std::shared_ptr<Transport> create(std::chrono::milliseconds timeout) {
  initialise_mpi();
  auto engine = std::make_shared<Engine>(timeout);
  std::vector<int> members(static_cast<size_t>(engine->world_size()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<MpiTransport>(engine, engine->world(), std::move(members), engine->world_rank());
}

void shutdown(Transport& world) {
  auto& mine = dynamic_cast<MpiTransport&>(world);
  if (mine.engine().watch().has_failed()) return;
  mine.barrier();
  mine.engine().close();
  const Alarm end = end_of_waiting(mine.engine(), "end");
  if (owns_mpi.exchange(false)) mpi_check(MPI_Finalize(), "MPI_Finalize");
}

}  // namespace smp::runtime::mpi
