//! `lock-worker`: code that tests run in other processes. One module per subcommand in `worker/`;
//! to add one, write its module with a clap `Args` struct that has `async fn run(self, parent:
//! Parent)`, and name it in [`Task`] and `main`.

#[path = "worker/connect.rs"]
mod connect;
#[path = "../../../lock-runtime/guide/stores/files.rs"]
#[allow(unreachable_pub, reason = "the guide shows it as a public type")]
mod files;
#[path = "worker/from_env.rs"]
mod from_env;
#[path = "worker/hoard.rs"]
mod hoard;
#[path = "worker/hold.rs"]
mod hold;
#[path = "worker/idle.rs"]
mod idle;
#[path = "worker/increment.rs"]
mod increment;
#[path = "worker/nested.rs"]
mod nested;
#[path = "worker/once.rs"]
mod once;
#[path = "worker/postgres.rs"]
mod postgres;
#[path = "worker/redis.rs"]
mod redis;
#[path = "worker/retain.rs"]
mod retain;
#[path = "worker/scheduled.rs"]
mod scheduled;
#[path = "worker/storm.rs"]
mod storm;
#[path = "worker/wait.rs"]
mod wait;

use clap::Parser;
use lock_tests::processes::Parent;

/// Runs one task for the test that started it, and ends when its standard input ends.
#[derive(Parser)]
enum Task {
    Connect(connect::Connect),
    FromEnv(from_env::FromEnv),
    Hold(hold::Hold),
    Hoard(hoard::Hoard),
    Idle(idle::Idle),
    Increment(increment::Increment),
    Nested(nested::Nested),
    Once(once::Once),
    Postgres(postgres::Postgres),
    Redis(redis::Redis),
    Retain(retain::Retain),
    Scheduled(scheduled::Scheduled),
    Storm(storm::Storm),
    Wait(wait::Wait),
}

#[tokio::main]
async fn main() {
    let task = Task::parse();
    let parent = Parent::follow();
    match task {
        Task::Connect(task) => task.run(parent).await,
        Task::FromEnv(task) => task.run(parent).await,
        Task::Hold(task) => task.run(parent).await,
        Task::Hoard(task) => task.run(parent).await,
        Task::Idle(task) => task.run(parent).await,
        Task::Increment(task) => task.run(parent).await,
        Task::Nested(task) => task.run(parent).await,
        Task::Once(task) => task.run(parent).await,
        Task::Postgres(task) => task.run(parent).await,
        Task::Redis(task) => task.run(parent).await,
        Task::Retain(task) => task.run(parent).await,
        Task::Scheduled(task) => task.run(parent).await,
        Task::Storm(task) => task.run(parent).await,
        Task::Wait(task) => task.run(parent).await,
    }
}
