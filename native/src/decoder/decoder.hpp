// Layers of a model on the CPU, of Llama's family or one that differs as DecoderShape and DecoderLayer can say: weights where they lie, keys and values in blocks, one call a step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "threads.hpp"

namespace fs {

// Turns of the first numbers of each head, two for each frequency in radians a position; the factor is of both parts.
struct RotaryTurns {
  std::vector<float> inverse_frequencies;
  float factor = 1.0f;
};

struct DecoderShape {
  std::size_t hidden_size, head_count, kv_head_count, head_dim, ffn_size, vocab_size;
  float norm_eps;
  RotaryTurns turns[2];  // of layers by their `turns`; as many frequencies in both
  std::size_t block_count, block_tokens;
  Type kv_type;
  float attention_scale, attention_softcap, embedding_scale, residual_scale;
  bool gelu;  // else silu
};

// What a family lacks is empty.
struct DecoderLayer {
  Matrix attention_norm, q, k, v, o, ffn_norm, gate, up, down;
  Matrix q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  Matrix q_norm, k_norm, attention_output_norm, ffn_output_norm;
  std::size_t window = 0;  // how many tokens a token sees, itself included; 0: all before it
  std::size_t turns = 0;   // of DecoderShape
};

// A stage's layers. Embedding, final norm and head are empty in all stages but the first, which samples.
struct DecoderWeights {
  std::vector<DecoderLayer> layers;
  Matrix embedding, final_norm, head;
};

// Rows of several sequences end to end; see Batch in runtime/llm/engine/runner.py.
struct DecoderBatch {
  const std::int32_t* tokens;  // or null, and `hidden` [rows][hidden_size]
  const float* hidden;
  const std::int32_t* positions;
  std::size_t rows;
  const std::int32_t* starts;  // sequences + 1
  std::size_t sequences;
  const std::int32_t* tables;  // [sequences][table_width], -1 pads
  std::size_t table_width;
  bool ends_in_logits;              // else in hidden states, for the next stage
  const std::int32_t* logits_rows;  // if it does
  std::size_t logits_count;
  float* output;  // [logits_count][vocab_size], or [rows][hidden_size]
};

// Tokens [begin, end) of one sequence, in the blocks of its table.
struct CachedTokens {
  const std::int32_t* table;
  std::size_t table_size;
  std::int64_t begin, end;
};

// Zeroed memory whose pages cost nothing until they are touched.
class LazyMemory {
 public:
  explicit LazyMemory(std::size_t size_bytes);
  ~LazyMemory();
  LazyMemory(const LazyMemory&) = delete;
  LazyMemory& operator=(const LazyMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_;
};

// Room for floats that grows and is not cleared, at whole cache lines: a vector that lies across two costs two loads.
class Floats {
 public:
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  float& operator[](std::size_t index) { return data_.get()[index]; }
  void make_room(std::size_t count);

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  std::size_t count_ = 0;
};

// Does not own the weights' memory: who binds it does. `step` and `logits` are for one thread at a time; `read_kv` and
// `write_kv` may run beside them, in others: the cache is append-only, so tokens that were written stay as they are.
class Decoder {
 public:
  // std::invalid_argument for shapes that do not fit together or that the kernels do not take.
  Decoder(DecoderShape shape, DecoderWeights weights, unsigned threads, const std::string& isa);

  // std::invalid_argument, std::out_of_range for a batch that would read or write where it must not;
  // nothing was changed then. std::logic_error if another thread is in a step.
  void step(const DecoderBatch& batch);

  // What a step does behind the last layer, to hidden states [rows][hidden_size] that come back from the last stage.
  // Errors as of `step`.
  void logits(const float* hidden, std::size_t rows, float* output);

  // Bytes that the tokens take in `layers` layers: [layer][key, value][kv_head][token][head_dim] of kv_type.
  // std::invalid_argument, std::out_of_range for tokens that the table or the pool has no room for.
  std::size_t kv_bytes(const CachedTokens& tokens, std::size_t layers) const;
  // Copies the tokens, which steps that are over have written, out of all layers.
  void read_kv(const CachedTokens& tokens, std::byte* to) const;
  // Copies tokens, which no step reads yet, into as many layers, from `first_layer` on, as the bytes hold. Errors as
  // of `kv_bytes`, and for layers that the decoder has not; nothing was changed then.
  void write_kv(const CachedTokens& tokens, std::size_t first_layer, const std::byte* from, std::size_t size_bytes);

  std::size_t layer_count() const { return weights_.layers.size(); }
  const char* isa() const { return kernels_.name; }
  const DecoderShape& shape() const { return shape_; }
  bool has_embedding() const { return weights_.embedding.data != nullptr; }
  bool has_head() const { return weights_.head.data != nullptr; }

 private:
  struct Projection {
    const Matrix* matrix;
    float* output;
    std::size_t stride;
  };
  struct QueryTile {
    std::uint32_t sequence, kv_head, first, count;  // of the sequence's rows times query heads a kv head
  };
  // One thread's time in a step; std::logic_error if another has it.
  class Turn {
   public:
    explicit Turn(std::atomic<bool>& taken);
    ~Turn() { taken_.store(false); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    std::atomic<bool>& taken_;
  };

  // A layer's biases in fp32; empty where it has none.
  struct Biases {
    std::vector<float> qkv, o, gate, up, down;
  };
  void check_layer(const DecoderLayer& layer) const;
  std::vector<float> widened(const Matrix& vector) const;
  Biases biases_of(const DecoderLayer& layer) const;
  void check(const DecoderBatch& batch) const;
  void prepare(const DecoderBatch& batch);
  void embed(const DecoderBatch& batch);
  void attention(const DecoderBatch& batch, const DecoderLayer& layer, std::size_t index);
  void place(const DecoderBatch& batch, std::size_t index, std::size_t row);
  void norm_heads(float* heads, std::size_t count, const Matrix& weight);
  void add_result(const Matrix& matrix, const float* x, std::size_t x_stride, std::size_t rows,
                  const std::vector<float>& bias, const Matrix& output_norm);
  void attend(const DecoderBatch& batch, std::size_t index, const QueryTile& tile, unsigned thread);
  void ffn(const DecoderBatch& batch, const DecoderLayer& layer, const Biases& biases);
  void finish(const DecoderBatch& batch);
  void project_head(std::size_t rows, float* output);

  template <class Body>
  void each_row(std::size_t rows, const Body& body);
  void norm(const float* x, std::size_t rows, const Matrix& weight);
  void project(const float* x, std::size_t x_stride, std::size_t rows, const Projection* begin, std::size_t count,
               bool onto);
  std::size_t grain(const Matrix& matrix, std::size_t rows) const;

  template <class Copy>
  void each_run(const CachedTokens& tokens, std::size_t first_layer, std::size_t layers, const Copy& copy) const;
  std::byte* key_at(std::size_t layer, std::size_t block, std::size_t kv_head) const;
  std::byte* value_at(std::size_t layer, std::size_t block, std::size_t kv_head) const;

  const DecoderShape shape_;
  const DecoderWeights weights_;
  const Kernels& kernels_;
  const Attention attention_;
  ThreadTeam team_;

  // A block holds all layers, [layer][key, value][kv_head][token][head_dim]: it moves as one piece.
  std::size_t head_block_bytes_, layer_block_bytes_, block_bytes_;
  std::unique_ptr<LazyMemory> cache_;
  std::atomic<bool> stepping_{false};

  struct Thread {
    Floats panel, queries, scratch;
    std::vector<const void*> keys, values;
  };
  std::vector<Thread> local_;
  std::vector<Biases> biases_;
  Floats x_, normed_, qkv_, mixed_, gate_, up_, result_, cosines_[2], sines_[2];
  std::vector<std::uint32_t> sequence_of_;
  std::vector<QueryTile> tiles_;
};

}  // namespace fs
