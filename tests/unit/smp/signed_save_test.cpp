// Saves with a key: those of others do not load.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "smp/engine/checkpoint/signature.h"
#include "smp/engine/checkpoint/state_format.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/examples/temporary_folder.h"
#include "tests/unit/smp/saved_folder.h"
#include "tests/unit/smp/saved_training.h"

namespace smp {
namespace {

namespace fs = std::filesystem;
using support::contains;
using support::message_of;
using tests::run_smp_ranks;
using tests::SmallNet;

class SignedSaves : public testing::Test {
 protected:
  std::string key(const std::string& name, const std::string& content, mode_t mode = 0600) const {
    const std::string path = place_.path(name);
    std::ofstream(path) << content << "\n";
    chmod(path.c_str(), mode);
    return path;
  }
  std::string good_key(char letter = 'k') const { return key(std::string("key_") + letter, std::string(40, letter)); }
  std::string folder() const { return place_.path("save"); }

  void run(const std::string& key_file, const std::function<void(DistributedModel<SmallNet>&)>& body) const {
    run_smp_ranks(2, {.microbatches = 2, .log_level = LogLevel::kOff, .save_key_file = key_file}, [&] {
      tests::SavedTraining<> training;
      training.train(0, 1);
      body(training.model);
    });
  }
  void save(const std::string& key_file) const {
    run(key_file, [&](auto& model) { save_state(folder(), model, {{"a", "b"}}); });
  }
  void expect_refused(const std::string& key_file, const std::string& part) const {
    run(key_file, [&](auto& model) {
      const std::string text = message_of<c10::ValueError>([&] { load_state(folder(), model); });
      EXPECT_TRUE(contains(text, part)) << text;
    });
  }

 private:
  TemporaryFolder place_;
};

TEST_F(SignedSaves, AreThoseOfTheKeyAlone) {
  save(good_key());
  run(good_key(), [&](auto& model) { EXPECT_EQ(load_state(folder(), model), (UserContent{{"a", "b"}})); });
  run("", [&](auto& model) { EXPECT_EQ(load_state(folder(), model), (UserContent{{"a", "b"}})); });  // which asks for none
  expect_refused(good_key('o'), "expected the signature of the key in '" + good_key('o') + "', got another");
  // Somebody changes a weight, and the checksum with it.
  const std::string file = engine::find_save(folder()).path(0);
  Safetensors forged = read_safetensors(file);
  forged.tensors.front().second.view(-1)[0].add_(1);
  forged.metadata["checksum"] = engine::checksum_of(forged);
  write_safetensors(file, forged);
  run("", [&](auto& model) { load_state(folder(), model); });
  expect_refused(good_key(), "got another");
  save("");
  expect_refused(good_key(), "got none. It was written without that key.");
}

TEST_F(SignedSaves, WantAKeyThatIsOne) {
  for (const std::string& path : {key("open", std::string(40, 'k'), 0644), key("short", "0123456789"), folder() + "/none"}) {
    run(path, [&](auto& model) {
      EXPECT_TRUE(contains(message_of([&] { save_state(folder(), model); }), "save_key_file: expected"));
      EXPECT_FALSE(fs::exists(folder() + "/state.json"));
    });
  }
}

// RFC 4231, test case 2.
TEST(Signature, IsThatOfTheStandard) {
  engine::Signature signature("Jefe");
  signature.add("what do ya want ");
  signature.add("for nothing?");
  EXPECT_EQ(signature.text(), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_TRUE(engine::are_equal_signatures("ab", "ab"));
  EXPECT_FALSE(engine::are_equal_signatures("ab", "ac"));
  EXPECT_FALSE(engine::are_equal_signatures("ab", "abc"));
}

}  // namespace
}  // namespace smp
