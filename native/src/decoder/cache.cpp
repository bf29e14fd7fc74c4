// Keys and values of a decoder's sequences, in and out: what moves when a request goes on in another process.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "decoder.hpp"

namespace fs {

std::byte* Decoder::key_at(std::size_t layer, std::size_t block, std::size_t kv_head) const {
  return cache_->data() + block * block_bytes_ + layer * layer_block_bytes_ + kv_head * head_block_bytes_;
}

std::byte* Decoder::value_at(std::size_t layer, std::size_t block, std::size_t kv_head) const {
  return key_at(layer, block, shape_.kv_head_count + kv_head);
}

std::size_t Decoder::kv_bytes(const CachedTokens& tokens, std::size_t layers) const {
  const std::size_t room = tokens.table_size * shape_.block_tokens;
  if (tokens.begin < 0 || tokens.begin > tokens.end || static_cast<std::size_t>(tokens.end) > room)
    throw std::invalid_argument("decoder: tokens " + std::to_string(tokens.begin) + " to " +
                                std::to_string(tokens.end) + " of a table with room for " + std::to_string(room));
  const auto begin = static_cast<std::size_t>(tokens.begin), end = static_cast<std::size_t>(tokens.end);
  for (std::size_t i = begin / shape_.block_tokens; i * shape_.block_tokens < end; ++i)
    if (tokens.table[i] < 0 || static_cast<std::size_t>(tokens.table[i]) >= shape_.block_count)
      throw std::out_of_range("decoder: block " + std::to_string(tokens.table[i]) + " of a pool of " +
                              std::to_string(shape_.block_count));
  return layers * layer_block_bytes_ / shape_.block_tokens * (end - begin);
}

// copy(place in the cache, offset in the bytes, count of bytes) for each run of tokens that lie together in both.
template <class Copy>
void Decoder::each_run(const CachedTokens& tokens, std::size_t first_layer, std::size_t layers,
                       const Copy& copy) const {
  const std::size_t token_bytes = head_block_bytes_ / shape_.block_tokens;
  const auto begin = static_cast<std::size_t>(tokens.begin), end = static_cast<std::size_t>(tokens.end);
  std::size_t offset = 0;
  for (std::size_t layer = first_layer; layer < first_layer + layers; ++layer)
    for (std::size_t head = 0; head < 2 * shape_.kv_head_count; ++head)  // values follow the keys
      for (std::size_t token = begin; token < end;) {
        const std::size_t within = token % shape_.block_tokens;
        const std::size_t count = std::min(shape_.block_tokens - within, end - token);
        const auto block = static_cast<std::size_t>(tokens.table[token / shape_.block_tokens]);
        copy(key_at(layer, block, head) + within * token_bytes, offset, count * token_bytes);
        offset += count * token_bytes;
        token += count;
      }
}

void Decoder::read_kv(const CachedTokens& tokens, std::byte* to) const {
  kv_bytes(tokens, layer_count());
  each_run(tokens, 0, layer_count(), [&](const std::byte* from, std::size_t offset, std::size_t count) {
    std::memcpy(to + offset, from, count);
  });
}

void Decoder::write_kv(const CachedTokens& tokens, std::size_t first_layer, const std::byte* from,
                       std::size_t size_bytes) {
  const std::size_t layer_bytes = kv_bytes(tokens, 1);
  const std::size_t layers = layer_bytes == 0 ? 0 : size_bytes / layer_bytes;
  if (layers * layer_bytes != size_bytes || (layers == 0 && layer_bytes != 0))
    throw std::invalid_argument("decoder: " + std::to_string(size_bytes) + " bytes of keys and values, a layer of " +
                                std::to_string(tokens.end - tokens.begin) + " tokens has " +
                                std::to_string(layer_bytes));
  if (first_layer > layer_count() || layers > layer_count() - first_layer)
    throw std::invalid_argument("decoder: keys and values of " + std::to_string(layers) + " layers from layer " +
                                std::to_string(first_layer) + " on, of " + std::to_string(layer_count()));
  each_run(tokens, first_layer, layers, [&](std::byte* to, std::size_t offset, std::size_t count) {
    std::memcpy(to, from + offset, count);
  });
}

}  // namespace fs
