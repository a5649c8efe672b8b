// What fake drivers of a GPU have in common: memory that the host cannot touch, and streams that run late.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace fake {

[[noreturn]] inline void die(const std::string& why) {
  std::fprintf(stderr, "fake GPU: %s\n", why.c_str());
  std::abort();
}

// Device memory: mapped PROT_NONE where it is said to be, and once more where only streams find it. It begins as NaN.
class Memory {
 public:
  // `access`: what the host may do with it, PROT_NONE or more.
  explicit Memory(int access) : access_(access) {}
  // From now on the host may touch what is allocated.
  void let_host() { access_ = PROT_READ | PROT_WRITE; }
  void* allocate(size_t n, int device) {
    const int file = memfd_create("fake device", MFD_CLOEXEC);
    if (ftruncate(file, static_cast<off_t>(whole(n))) != 0) die("no memory");
    void* shown = map(file, n, device);
    std::memset(behind(reinterpret_cast<uintptr_t>(shown), n), 0xff, n);
    return shown;
  }
  // Memory that another process has allocated, and exported.
  void* import(int process, int their_file, size_t n, int device) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(their_file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    return file < 0 ? nullptr : map(file, n, device);
  }
  // The file that has what begins at a pointer, and its size; -1: nothing does.
  int file_of(uintptr_t pointer, size_t& n) {
    const std::lock_guard lock(mutex_);
    const auto it = all_.find(pointer);
    if (it == all_.end()) return -1;
    n = it->second.nbytes;
    return it->second.file;
  }
  void free(void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto it = all_.find(reinterpret_cast<uintptr_t>(pointer));
    if (it == all_.end()) die("memory that is not the device's is freed");
    munmap(it->second.alias, whole(it->second.nbytes));
    munmap(pointer, whole(it->second.nbytes));
    close(it->second.file);
    all_.erase(it);
  }
  // Where streams find `n` bytes of the device, and the device's number; null if they are not a device's.
  std::byte* behind(uintptr_t pointer, size_t n, int* device = nullptr) {
    const std::lock_guard lock(mutex_);
    auto it = all_.upper_bound(pointer);
    if (it == all_.begin()) return nullptr;
    --it;
    if (pointer + n > it->first + it->second.nbytes) return nullptr;
    if (device != nullptr) *device = it->second.device;
    return it->second.alias + (pointer - it->first);
  }
  size_t count() {
    const std::lock_guard lock(mutex_);
    return all_.size();
  }

 private:
  struct Allocation {
    size_t nbytes;
    int device;
    std::byte* alias;
    int file;
  };
  void* map(int file, size_t n, int device) {
    void* shown = mmap(nullptr, whole(n), access_, MAP_SHARED, file, 0);
    auto* alias = static_cast<std::byte*>(mmap(nullptr, whole(n), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    const std::lock_guard lock(mutex_);
    all_[reinterpret_cast<uintptr_t>(shown)] = {n, device, alias, file};
    return shown;
  }
  static size_t whole(size_t n) { return (n + 4095) / 4096 * 4096 + 4096; }
  std::atomic<int> access_;
  std::mutex mutex_;
  std::map<uintptr_t, Allocation> all_;
};

inline std::atomic<int> delay_us{50};  // at most, before each thing that a stream does

// A thread that does what it is given in order.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    push([this] { last_ = true; });
    thread_.join();
  }
  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }
  void finish() {
    while (!is_idle()) std::this_thread::yield();
  }

 private:
  void run() {
    std::mt19937 random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 4));
    while (!last_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const auto work = queue_.front();
      lock.unlock();
      const auto most = static_cast<unsigned>(delay_us.load());
      std::this_thread::sleep_for(std::chrono::microseconds(random() % (most + 1)));
      work();
      lock.lock();
      queue_.pop_front();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool last_ = false;
  std::thread thread_;
};

// A place in the work of a stream. What streams do may outlive the event.
class Event {
 public:
  void record(Stream& stream) {
    uint64_t number;
    {
      const std::lock_guard lock(record_->mutex);
      number = ++record_->recorded;
    }
    stream.push([record = record_, number] {
      const std::lock_guard lock(record->mutex);
      if (number > record->done) record->done = number;
      record->changed.notify_all();
    });
  }
  void make_wait(Stream& stream) const {
    const uint64_t number = last();
    stream.push([record = record_, number] { await(*record, number); });
  }
  bool is_over() const {
    const std::lock_guard lock(record_->mutex);
    return record_->done >= record_->recorded;
  }
  void await() const { await(*record_, last()); }

 private:
  struct Record {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0;
  };
  uint64_t last() const {
    const std::lock_guard lock(record_->mutex);
    return record_->recorded;
  }
  static void await(Record& record, uint64_t number) {
    std::unique_lock lock(record.mutex);
    record.changed.wait(lock, [&] { return record.done >= number; });
  }
  const std::shared_ptr<Record> record_ = std::make_shared<Record>();
};

}  // namespace fake
