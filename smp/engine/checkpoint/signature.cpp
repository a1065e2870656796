// OpenSSL's message authentication.
#include "smp/engine/checkpoint/signature.h"

#include <c10/util/Exception.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>

#include "smp/engine/files/input_file.h"

namespace smp::engine {
namespace {

constexpr size_t kLeastKeyBytes = 32;  // of SHA-256

void check(bool is_good) { TORCH_CHECK(is_good, "signature of a save: expected OpenSSL to make one, got a failure."); }

}  // namespace

std::string read_save_key(const std::string& path) {
  if (path.empty()) return "";
  struct stat status{};
  TORCH_CHECK(::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
                  (status.st_mode & (S_IRWXG | S_IRWXO)) == 0,
              "save_key_file: expected a file of this user that nobody else can read (chmod 600), got '", path, "'.");
  std::string key = InputFile(path, "save_key_file: expected the key of saves").read_all();
  if (key.ends_with('\n')) key.pop_back();
  TORCH_CHECK(key.size() >= kLeastKeyBytes, "save_key_file: expected ", kLeastKeyBytes, " bytes or more in '", path,
              "', got ", key.size(), ". Make one by: (umask 077; head -c 32 /dev/urandom | base64 > key)");
  return key;
}

struct Signature::State {
  EVP_MAC* algorithm = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  EVP_MAC_CTX* context = algorithm == nullptr ? nullptr : EVP_MAC_CTX_new(algorithm);

  ~State() {
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(algorithm);
  }
};

Signature::Signature(std::string_view key) : state_(std::make_unique<State>()) {
  std::string digest = "SHA256";
  const std::array<OSSL_PARAM, 2> settings{OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest.data(), 0),
                                           OSSL_PARAM_construct_end()};
  check(state_->context != nullptr &&
        EVP_MAC_init(state_->context, reinterpret_cast<const unsigned char*>(key.data()), key.size(), settings.data()) == 1);
}

Signature::~Signature() = default;

void Signature::add(std::string_view bytes) {
  check(EVP_MAC_update(state_->context, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()) == 1);
}

std::string Signature::text() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  size_t num_bytes = 0;
  check(EVP_MAC_final(state_->context, digest.data(), &num_bytes, digest.size()) == 1);
  std::string text;
  for (size_t i = 0; i < num_bytes; ++i) {
    text += "0123456789abcdef"[digest[i] >> 4];
    text += "0123456789abcdef"[digest[i] & 15];
  }
  return text;
}

bool are_equal_signatures(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace smp::engine
