#include "decoder.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace fs {
namespace {

constexpr std::size_t kRowGrain = 8;       // rows a thread takes at a time where work goes by rows
constexpr std::size_t kGrainsAThread = 4;  // enough that a thread which loses its core is not waited for long

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("decoder: " + what);
}

void require_shape(const Matrix& matrix, std::size_t rows, std::size_t columns, const char* name) {
  require(matrix.data != nullptr && matrix.rows == rows && matrix.columns == columns,
          std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "], is [" +
              std::to_string(matrix.rows) + ", " + std::to_string(matrix.columns) + "]");
}

void require_vector(const Matrix& vector, std::size_t width, const char* name) {
  require_shape(vector, 1, width, name);
  require(vector.type != Type::i8, std::string(name) + " is not in int8: only matrices may be");
}

std::size_t round_up(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

// Of numbers that are multiplied: another one each time, in all decoders.
std::uint64_t next_version() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

LazyMemory::LazyMemory(std::size_t size_bytes) : size_bytes_(size_bytes) {
  void* const mapped =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(mapped);
}

void Floats::make_room(std::size_t count) {
  if (count <= count_) return;
  constexpr std::size_t kLine = 64;
  data_.reset(static_cast<float*>(std::aligned_alloc(kLine, round_up(count * sizeof(float), kLine))));
  count_ = data_ == nullptr ? 0 : count;
  if (data_ == nullptr) throw std::bad_alloc();
}

LazyMemory::~LazyMemory() { munmap(data_, size_bytes_); }

Decoder::Decoder(DecoderShape shape, DecoderWeights weights, unsigned threads, const std::string& isa)
    : shape_(std::move(shape)),
      weights_(std::move(weights)),
      kernels_(kernels_named(isa)),
      attention_(kernels_.attention({shape_.head_dim, shape_.block_tokens, shape_.kv_type, shape_.attention_softcap})),
      team_(threads) {
  const DecoderShape& s = shape_;
  require(s.head_count > 0 && s.kv_head_count > 0 && s.head_count % s.kv_head_count == 0, "heads do not divide");
  require(s.hidden_size % kLanes == 0 && s.ffn_size % kLanes == 0 && s.head_dim % kLanes == 0 && s.hidden_size > 0 &&
              s.ffn_size > 0 && s.head_dim > 0,
          "hidden size, ffn size and head size must be multiples of " + std::to_string(kLanes));
  const std::size_t pairs = s.turns[0].inverse_frequencies.size();
  require(pairs > 0 && pairs <= s.head_dim / 2 && s.turns[1].inverse_frequencies.size() == pairs,
          "one frequency for each pair of a head that is turned is needed");
  require(s.block_count > 0 && s.block_tokens > 0 && s.block_tokens % 4 == 0, "block size must be a multiple of 4");
  require(!weights_.layers.empty(), "no layers");
  const std::size_t q_width = s.head_count * s.head_dim;
  for (const DecoderLayer& layer : weights_.layers) {
    check_layer(layer);
    biases_.push_back(biases_of(layer));
  }
  if (has_embedding()) {
    require_shape(weights_.embedding, s.vocab_size, s.hidden_size, "embedding");
    require(weights_.embedding.type != Type::i8, "the embedding is not in int8: its rows are read, not multiplied");
  }
  if (has_head()) {
    require_shape(weights_.head, s.vocab_size, s.hidden_size, "head");
    require_vector(weights_.final_norm, s.hidden_size, "final norm");
  }
  head_block_bytes_ = s.block_tokens * s.head_dim * width_bytes(s.kv_type);
  layer_block_bytes_ = 2 * s.kv_head_count * head_block_bytes_;
  block_bytes_ = weights_.layers.size() * layer_block_bytes_;
  cache_ = std::make_unique<LazyMemory>(s.block_count * block_bytes_);
  local_.resize(team_.threads());
  for (Thread& local : local_)
    local.panel.make_room(std::max({kernels_.scratch_floats, s.hidden_size, s.ffn_size, q_width}));
}

void Decoder::check_layer(const DecoderLayer& layer) const {
  const DecoderShape& s = shape_;
  const std::size_t q_width = s.head_count * s.head_dim, kv_width = s.kv_head_count * s.head_dim;
  const auto vector = [](const Matrix& matrix, std::size_t width, const char* name) {
    if (matrix.data != nullptr) require_vector(matrix, width, name);
  };
  require_vector(layer.attention_norm, s.hidden_size, "attention norm");
  require_shape(layer.q, q_width, s.hidden_size, "q");
  require_shape(layer.k, kv_width, s.hidden_size, "k");
  require_shape(layer.v, kv_width, s.hidden_size, "v");
  require_shape(layer.o, s.hidden_size, q_width, "o");
  require_vector(layer.ffn_norm, s.hidden_size, "ffn norm");
  require_shape(layer.gate, s.ffn_size, s.hidden_size, "gate");
  require_shape(layer.up, s.ffn_size, s.hidden_size, "up");
  require_shape(layer.down, s.hidden_size, s.ffn_size, "down");
  vector(layer.q_bias, q_width, "q bias");
  vector(layer.k_bias, kv_width, "k bias");
  vector(layer.v_bias, kv_width, "v bias");
  vector(layer.o_bias, s.hidden_size, "o bias");
  vector(layer.gate_bias, s.ffn_size, "gate bias");
  vector(layer.up_bias, s.ffn_size, "up bias");
  vector(layer.down_bias, s.hidden_size, "down bias");
  vector(layer.q_norm, s.head_dim, "q norm");
  vector(layer.k_norm, s.head_dim, "k norm");
  vector(layer.attention_output_norm, s.hidden_size, "attention output norm");
  vector(layer.ffn_output_norm, s.hidden_size, "ffn output norm");
  require((layer.q_bias.data == nullptr) == (layer.k_bias.data == nullptr) &&
              (layer.q_bias.data == nullptr) == (layer.v_bias.data == nullptr),
          "q, k and v have biases together");
  require(layer.turns < 2, "turns are 0 or 1");
}

std::vector<float> Decoder::widened(const Matrix& vector) const {
  std::vector<float> wide(vector.data == nullptr ? 0 : vector.columns);
  if (!wide.empty()) kernels_.widen(vector.data, vector.type, wide.size(), wide.data());
  return wide;
}

Decoder::Biases Decoder::biases_of(const DecoderLayer& layer) const {
  Biases biases{widened(layer.q_bias), widened(layer.o_bias), widened(layer.gate_bias), widened(layer.up_bias),
                widened(layer.down_bias)};
  for (const Matrix* next : {&layer.k_bias, &layer.v_bias}) {
    const std::vector<float> wide = widened(*next);
    biases.qkv.insert(biases.qkv.end(), wide.begin(), wide.end());
  }
  return biases;
}

Decoder::Turn::Turn(std::atomic<bool>& taken) : taken_(taken) {
  if (taken.exchange(true)) throw std::logic_error("decoder: another thread is in a step");
}

void Decoder::step(const DecoderBatch& batch) {
  const Turn turn(stepping_);
  check(batch);
  if (batch.rows == 0) return;
  prepare(batch);
  embed(batch);
  for (std::size_t index = 0; index < weights_.layers.size(); ++index) {
    attention(batch, weights_.layers[index], index);
    ffn(batch, weights_.layers[index], biases_[index]);
  }
  finish(batch);
}

void Decoder::logits(const float* hidden, std::size_t rows, float* output) {
  const Turn turn(stepping_);
  require(has_head(), "the head belongs to the first stage");
  normed_.make_room(rows * shape_.hidden_size);
  norm(hidden, rows, weights_.final_norm);
  project_head(rows, output);
}

void Decoder::check(const DecoderBatch& b) const {
  require((b.tokens != nullptr) == has_embedding() && (b.hidden == nullptr) == has_embedding(),
          "the first stage takes tokens, the others hidden states");
  require(b.starts[0] == 0 && static_cast<std::size_t>(b.starts[b.sequences]) == b.rows, "starts do not span the rows");
  for (std::size_t s = 0; s < b.sequences; ++s) {
    const std::int32_t begin = b.starts[s], end = b.starts[s + 1];
    // Ends are checked before anything is read at them: they need not rise.
    require(0 <= begin && begin < end && static_cast<std::size_t>(end) <= b.rows, "starts must rise within the rows");
    const std::int32_t position = b.positions[begin];
    require(position >= 0, "a position is negative");
    for (std::int32_t row = begin; row < end; ++row)
      require(b.positions[row] == position + (row - begin), "positions of a sequence must be consecutive");
    const std::size_t blocks =
        round_up(static_cast<std::size_t>(position) + static_cast<std::size_t>(end - begin), shape_.block_tokens) /
        shape_.block_tokens;
    require(blocks <= b.table_width, "a block table is too short for its positions");
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::int32_t block = b.tables[s * b.table_width + i];
      if (block < 0 || static_cast<std::size_t>(block) >= shape_.block_count)
        throw std::out_of_range("decoder: block " + std::to_string(block) + " of a pool of " +
                                std::to_string(shape_.block_count));
    }
  }
  if (b.tokens != nullptr)
    for (std::size_t row = 0; row < b.rows; ++row)
      if (b.tokens[row] < 0 || static_cast<std::size_t>(b.tokens[row]) >= shape_.vocab_size)
        throw std::out_of_range("decoder: token " + std::to_string(b.tokens[row]) + " of a vocabulary of " +
                                std::to_string(shape_.vocab_size));
  if (!b.ends_in_logits) return;
  require(has_head(), "the head belongs to the first stage");
  for (std::size_t i = 0; i < b.logits_count; ++i)
    if (b.logits_rows[i] < 0 || static_cast<std::size_t>(b.logits_rows[i]) >= b.rows)
      throw std::out_of_range("decoder: logits of row " + std::to_string(b.logits_rows[i]) + " of " +
                              std::to_string(b.rows));
}

void Decoder::prepare(const DecoderBatch& b) {
  const DecoderShape& s = shape_;
  const std::size_t group = s.head_count / s.kv_head_count, pairs = s.turns[0].inverse_frequencies.size();
  const std::size_t q_width = s.head_count * s.head_dim, kv_width = s.kv_head_count * s.head_dim;
  x_.make_room(b.rows * s.hidden_size);
  normed_.make_room(std::max(b.rows, b.logits_count) * s.hidden_size);
  qkv_.make_room(b.rows * (q_width + 2 * kv_width));
  mixed_.make_room(b.rows * q_width);
  gate_.make_room(b.rows * s.ffn_size);
  up_.make_room(b.rows * s.ffn_size);
  bool turned[2] = {false, false};
  for (const DecoderLayer& layer : weights_.layers) turned[layer.turns] = true;
  for (std::size_t kind = 0; kind < 2; ++kind) {
    if (!turned[kind]) continue;
    cosines_[kind].make_room(b.rows * pairs);
    sines_[kind].make_room(b.rows * pairs);
  }
  sequence_of_.resize(b.rows);
  tiles_.clear();
  std::size_t longest = 0;
  for (std::size_t sequence = 0; sequence < b.sequences; ++sequence) {
    const auto begin = static_cast<std::size_t>(b.starts[sequence]), end = static_cast<std::size_t>(b.starts[sequence + 1]);
    std::fill(sequence_of_.begin() + static_cast<std::ptrdiff_t>(begin),
              sequence_of_.begin() + static_cast<std::ptrdiff_t>(end), static_cast<std::uint32_t>(sequence));
    longest = std::max(longest, static_cast<std::size_t>(b.positions[end - 1]) + 1);
    const std::size_t queries = (end - begin) * group;
    for (std::size_t head = 0; head < s.kv_head_count; ++head)
      for (std::size_t first = 0; first < queries; first += attention_.rows)
        tiles_.push_back({static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(head),
                          static_cast<std::uint32_t>(first),
                          static_cast<std::uint32_t>(std::min(attention_.rows, queries - first))});
  }
  for (Thread& local : local_) {
    local.queries.make_room(attention_.rows * s.head_dim);
    local.scratch.make_room(attention_.scratch_floats(s.head_dim, round_up(longest, s.block_tokens)));
    local.keys.resize(std::max(local.keys.size(), b.table_width));
    local.values.resize(local.keys.size());
  }
  each_row(b.rows, [&](std::size_t row) {
    const auto position = static_cast<float>(b.positions[row]);
    for (std::size_t kind = 0; kind < 2; ++kind) {
      if (!turned[kind]) continue;
      const RotaryTurns& turns = s.turns[kind];
      for (std::size_t i = 0; i < pairs; ++i) {
        const float angle = position * turns.inverse_frequencies[i];
        cosines_[kind][row * pairs + i] = std::cos(angle) * turns.factor;
        sines_[kind][row * pairs + i] = std::sin(angle) * turns.factor;
      }
    }
  });
}

void Decoder::embed(const DecoderBatch& b) {
  const std::size_t hidden = shape_.hidden_size;
  if (b.hidden != nullptr) {
    std::memcpy(x_.data(), b.hidden, b.rows * hidden * sizeof(float));
    return;
  }
  const Matrix& table = weights_.embedding;
  const auto* const rows = static_cast<const std::byte*>(table.data);
  for (std::size_t row = 0; row < b.rows; ++row)
    kernels_.widen(rows + static_cast<std::size_t>(b.tokens[row]) * hidden * width_bytes(table.type), table.type, hidden,
                   x_.data() + row * hidden);
  if (shape_.embedding_scale == 1.0f) return;
  for (std::size_t i = 0; i < b.rows * hidden; ++i) x_[i] *= shape_.embedding_scale;
}

void Decoder::attention(const DecoderBatch& b, const DecoderLayer& layer, std::size_t index) {
  const DecoderShape& s = shape_;
  const std::size_t q_width = s.head_count * s.head_dim, kv_width = s.kv_head_count * s.head_dim;
  const std::size_t stride = q_width + 2 * kv_width;
  norm(x_.data(), b.rows, layer.attention_norm);
  const Projection inward[] = {{&layer.q, qkv_.data(), stride},
                               {&layer.k, qkv_.data() + q_width, stride},
                               {&layer.v, qkv_.data() + q_width + kv_width, stride}};
  project(normed_.data(), s.hidden_size, b.rows, inward, 3, false);
  each_row(b.rows, [&](std::size_t row) { place(b, index, row); });
  team_.run(tiles_.size(),
            [&](std::size_t tile, unsigned thread) { attend(b, index, tiles_[tile], thread); });
  add_result(layer.o, mixed_.data(), q_width, b.rows, biases_[index].o, layer.attention_output_norm);
}

// Adds the rows' products with a matrix to the hidden states, with what a family does to a result before.
void Decoder::add_result(const Matrix& matrix, const float* x, std::size_t x_stride, std::size_t rows,
                         const std::vector<float>& bias, const Matrix& output_norm) {
  const std::size_t hidden = shape_.hidden_size;
  const float scale = shape_.residual_scale;
  if (bias.empty() && output_norm.data == nullptr && scale == 1.0f) {
    const Projection onto{&matrix, x_.data(), hidden};
    project(x, x_stride, rows, &onto, 1, true);
    return;
  }
  result_.make_room(rows * hidden);
  const Projection apart{&matrix, result_.data(), hidden};
  project(x, x_stride, rows, &apart, 1, false);
  each_row(rows, [&](std::size_t row) {
    float* const result = result_.data() + row * hidden;
    float* const to = x_.data() + row * hidden;
    for (std::size_t i = 0; i < bias.size(); ++i) result[i] += bias[i];
    if (output_norm.data != nullptr) kernels_.norm(result, output_norm, shape_.norm_eps, result);
    for (std::size_t i = 0; i < hidden; ++i) to[i] += result[i] * scale;
  });
}

void Decoder::norm_heads(float* heads, std::size_t count, const Matrix& weight) {
  if (weight.data == nullptr) return;
  for (std::size_t head = 0; head < count; ++head) {
    float* const at = heads + head * shape_.head_dim;
    kernels_.norm(at, weight, shape_.norm_eps, at);
  }
}

// Adds the biases of a row's queries, keys and values, norms and rotates its queries and keys, and puts its key and value into its sequence's block.
void Decoder::place(const DecoderBatch& b, std::size_t index, std::size_t row) {
  const DecoderShape& s = shape_;
  const std::size_t q_width = s.head_count * s.head_dim, kv_width = s.kv_head_count * s.head_dim;
  float* const q = qkv_.data() + row * (q_width + 2 * kv_width);
  float* const k = q + q_width;
  const float* const v = k + kv_width;
  const DecoderLayer& layer = weights_.layers[index];
  const std::vector<float>& bias = biases_[index].qkv;
  for (std::size_t i = 0; i < bias.size(); ++i) q[i] += bias[i];
  norm_heads(q, s.head_count, layer.q_norm);
  norm_heads(k, s.kv_head_count, layer.k_norm);
  const std::size_t pairs = s.turns[0].inverse_frequencies.size(), heads = s.head_count + s.kv_head_count;
  const float* const cosines = cosines_[layer.turns].data() + row * pairs;
  const float* const sines = sines_[layer.turns].data() + row * pairs;
  // Queries and keys are neighbours: one call turns both.
  if (2 * pairs == s.head_dim)
    kernels_.rotate(q, heads, s.head_dim, cosines, sines);
  else
    for (std::size_t head = 0; head < heads; ++head)
      kernels_.rotate(q + head * s.head_dim, 1, 2 * pairs, cosines, sines);
  const auto position = static_cast<std::size_t>(b.positions[row]);
  const std::int32_t* const table = b.tables + sequence_of_[row] * b.table_width;
  const auto block = static_cast<std::size_t>(table[position / s.block_tokens]);
  const std::size_t offset = position % s.block_tokens * s.head_dim * width_bytes(s.kv_type);
  for (std::size_t head = 0; head < s.kv_head_count; ++head) {
    kernels_.narrow(k + head * s.head_dim, s.kv_type, s.head_dim, key_at(index, block, head) + offset);
    kernels_.narrow(v + head * s.head_dim, s.kv_type, s.head_dim, value_at(index, block, head) + offset);
  }
}

void Decoder::attend(const DecoderBatch& b, std::size_t index, const QueryTile& tile, unsigned thread) {
  const DecoderShape& s = shape_;
  Thread& local = local_[thread];
  const std::size_t group = s.head_count / s.kv_head_count, q_width = s.head_count * s.head_dim;
  const std::size_t stride = q_width + 2 * s.kv_head_count * s.head_dim;
  const std::size_t window = weights_.layers[index].window;
  const auto begin = static_cast<std::size_t>(b.starts[tile.sequence]);
  std::size_t begins[kMostQueryRows], limits[kMostQueryRows];
  float* outputs[kMostQueryRows];
  for (std::size_t i = 0; i < tile.count; ++i) {
    const std::size_t row = begin + (tile.first + i) / group;
    const std::size_t head = tile.kv_head * group + (tile.first + i) % group;
    const float* const query = qkv_.data() + row * stride + head * s.head_dim;
    for (std::size_t d = 0; d < s.head_dim; ++d) local.queries[i * s.head_dim + d] = query[d] * s.attention_scale;
    limits[i] = static_cast<std::size_t>(b.positions[row]) + 1;
    begins[i] = window == 0 || limits[i] <= window ? 0 : limits[i] - window;
    outputs[i] = mixed_.data() + row * q_width + head * s.head_dim;
  }
  // Blocks before every row's window are left out, by keys that are taken together: a row's sums go by its positions.
  std::size_t skipped = begins[0] / s.block_tokens;
  while (skipped * s.block_tokens % attention_.keys != 0) --skipped;
  for (std::size_t i = 0; i < tile.count; ++i) {
    begins[i] -= skipped * s.block_tokens;
    limits[i] -= skipped * s.block_tokens;
  }
  const std::size_t context = limits[tile.count - 1];
  const std::int32_t* const table = b.tables + tile.sequence * b.table_width + skipped;
  for (std::size_t i = 0; i * s.block_tokens < context; ++i) {
    local.keys[i] = key_at(index, static_cast<std::size_t>(table[i]), tile.kv_head);
    local.values[i] = value_at(index, static_cast<std::size_t>(table[i]), tile.kv_head);
  }
  attention_.attend({local.queries.data(), tile.count, begins, limits, s.attention_softcap, s.head_dim,
                     local.keys.data(), local.values.data(), s.kv_type, s.block_tokens, local.scratch.data(), outputs});
}

void Decoder::ffn(const DecoderBatch& b, const DecoderLayer& layer, const Biases& biases) {
  const std::size_t hidden = shape_.hidden_size, ffn_size = shape_.ffn_size;
  const auto activate = shape_.gelu ? kernels_.gate_gelu : kernels_.gate;
  norm(x_.data(), b.rows, layer.ffn_norm);
  // Both halves of one range of columns in one task, so that the gate is applied while they are in cache.
  const std::size_t columns = grain(layer.gate, b.rows);
  const std::uint64_t version = next_version();
  team_.run((ffn_size + columns - 1) / columns, [&](std::size_t task, unsigned thread) {
    const std::size_t begin = task * columns, end = std::min(begin + columns, ffn_size);
    float* const panel = local_[thread].panel.data();
    kernels_.multiply(normed_.data(), hidden, b.rows, layer.gate, begin, end, gate_.data(), ffn_size, false, panel,
                      version);
    kernels_.multiply(normed_.data(), hidden, b.rows, layer.up, begin, end, up_.data(), ffn_size, false, panel,
                      version);
    for (std::size_t row = 0; row < b.rows; ++row) {
      float* const gate = gate_.data() + row * ffn_size;
      float* const up = up_.data() + row * ffn_size;
      if (!biases.gate.empty()) for (std::size_t i = begin; i < end; ++i) gate[i] += biases.gate[i];
      if (!biases.up.empty()) for (std::size_t i = begin; i < end; ++i) up[i] += biases.up[i];
      activate(gate + begin, up + begin, end - begin);
    }
  });
  add_result(layer.down, gate_.data(), ffn_size, b.rows, biases.down, layer.ffn_output_norm);
}

void Decoder::finish(const DecoderBatch& b) {
  const std::size_t hidden = shape_.hidden_size;
  if (!b.ends_in_logits) {
    std::memcpy(b.output, x_.data(), b.rows * hidden * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < b.logits_count; ++i)
    kernels_.norm(x_.data() + static_cast<std::size_t>(b.logits_rows[i]) * hidden, weights_.final_norm, shape_.norm_eps,
                  normed_.data() + i * hidden);
  project_head(b.logits_count, b.output);
}

// Of the rows that were normed.
void Decoder::project_head(std::size_t rows, float* output) {
  const Projection head{&weights_.head, output, shape_.vocab_size};
  if (rows != 0) project(normed_.data(), shape_.hidden_size, rows, &head, 1, false);
}

template <class Body>
void Decoder::each_row(std::size_t rows, const Body& body) {
  team_.run((rows + kRowGrain - 1) / kRowGrain, [&](std::size_t task, unsigned) {
    const std::size_t end = std::min(rows, (task + 1) * kRowGrain);
    for (std::size_t row = task * kRowGrain; row < end; ++row) body(row);
  });
}

void Decoder::norm(const float* x, std::size_t rows, const Matrix& weight) {
  const std::size_t hidden = shape_.hidden_size;
  each_row(rows, [&](std::size_t row) {
    kernels_.norm(x + row * hidden, weight, shape_.norm_eps, normed_.data() + row * hidden);
  });
}

// Rows of a matrix that a thread takes at a time: a few shares each, and no less than one widened panel.
std::size_t Decoder::grain(const Matrix& matrix, std::size_t rows) const {
  if (team_.threads() == 1) return matrix.rows;
  const std::size_t share = matrix.rows / (team_.threads() * kGrainsAThread) + 1;
  const std::size_t panel = rows > kLanes ? std::max<std::size_t>(kPanelFloats / matrix.columns / 4, 24) : 24;
  return round_up(std::max(share, panel), 24);  // tiles are 3, 4 or 8 columns wide
}

void Decoder::project(const float* x, std::size_t x_stride, std::size_t rows, const Projection* begin,
                      std::size_t count, bool onto) {
  std::size_t tasks = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t step = grain(*begin[i].matrix, rows);
    tasks += (begin[i].matrix->rows + step - 1) / step;
  }
  const std::uint64_t version = next_version();
  team_.run(tasks, [&](std::size_t task, unsigned thread) {
    const Projection* projection = begin;
    std::size_t step = grain(*projection->matrix, rows);
    for (std::size_t own; task >= (own = (projection->matrix->rows + step - 1) / step);) {
      task -= own;
      ++projection;
      step = grain(*projection->matrix, rows);
    }
    const std::size_t first = task * step, last = std::min(first + step, projection->matrix->rows);
    kernels_.multiply(x, x_stride, rows, *projection->matrix, first, last, projection->output, projection->stride, onto,
                      local_[thread].panel.data(), version);
  });
}

}  // namespace fs
