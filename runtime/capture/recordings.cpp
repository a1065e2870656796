// Recordings by signature and by last use.
#include "runtime/capture/recordings.h"

#include <algorithm>

#include "partitioner/graph/graph_io.h"

namespace smp::runtime {

const Recordings::Bucket* Recordings::find(const std::string& key) const {
  const auto bucket = by_key_.find(key);
  return bucket == by_key_.end() ? nullptr : &bucket->second;
}

void Recordings::move_to_front(const std::shared_ptr<Recording>& recording) {
  Bucket& bucket = by_key_.at(recording->graph.key);
  const auto at = std::find(bucket.begin(), bucket.end(), recording);
  std::rotate(bucket.begin(), at, at + 1);
}

std::shared_ptr<Recording> Recordings::add(std::shared_ptr<Recording> recording) {
  Bucket& bucket = by_key_[recording->graph.key];
  const auto known = std::find_if(bucket.begin(), bucket.end(), [&](const auto& other) {
    return other->hash == recording->hash && partitioner::same_graph(other->graph, recording->graph);
  });
  if (known != bucket.end()) {
    std::rotate(bucket.begin(), known, known + 1);
    recording = bucket.front();
  } else {
    bucket.insert(bucket.begin(), recording);
  }
  note_use(*recording);
  forget_least_used();
  return recording;
}

void Recordings::forget_least_used() {
  size_t count = 0;
  for (const auto& [key, bucket] : by_key_) count += bucket.size();
  for (; count > max_recordings_; --count) {
    auto oldest = by_key_.begin();
    const auto by_use = [](const auto& a, const auto& b) { return a->last_use < b->last_use; };
    const auto least = [&](const Bucket& bucket) {
      return (*std::min_element(bucket.begin(), bucket.end(), by_use))->last_use;
    };
    for (auto at = by_key_.begin(); at != by_key_.end(); ++at) {
      if (least(at->second) < least(oldest->second)) oldest = at;
    }
    Bucket& bucket = oldest->second;
    bucket.erase(std::min_element(bucket.begin(), bucket.end(), by_use));
    if (bucket.empty()) by_key_.erase(oldest);
  }
}

}  // namespace smp::runtime
