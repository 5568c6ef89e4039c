//! Free functions.

use std::rc::Rc;

use lock_runtime::{LockError, distributed_lock};
use tokio::task::yield_now;

use super::{assert_excludes, is_send, visit};

#[distributed_lock(key = "order:{id}")]
pub(crate) async fn visible(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(id)
}

#[distributed_lock(key = "order:{type}")]
async fn r#async(r#type: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(r#type)
}

#[distributed_lock(key = "order:{depth}", reentrant, wait = "1s")]
async fn recursive(depth: u64) -> Result<u64, LockError> {
    yield_now().await;
    if depth == 0 {
        return Ok(0);
    }
    Ok(1 + Box::pin(recursive(depth - 1)).await?)
}

#[distributed_lock(key = "tree", global, reentrant)]
async fn walk(depth: u64) -> Result<u64, LockError> {
    if depth == 0 {
        visit("tree").await;
        return Ok(0);
    }
    Ok(1 + Box::pin(walk(depth - 1)).await?)
}

#[distributed_lock(key = "order:{id}")]
async fn thread_bound(id: u64) -> Result<u64, LockError> {
    let shared = Rc::new(id);
    visit("order:7").await;
    Ok(*shared)
}

#[distributed_lock(key = "where", global)]
async fn line() -> Result<u32, LockError> {
    visit("where").await;
    Ok(line!())
}

/// The line of the body above.
const LINE: u32 = line!() - 4;

#[distributed_lock(key = "where", global)]
async fn panics() -> Result<(), LockError> {
    panic!("as it likes")
}

macro_rules! generated {
    ($name:ident, $key:literal, $lease:expr, $result:ty, $argument:ident, $body:expr) => {
        #[distributed_lock(key = $key, lease = $lease)]
        async fn $name($argument: u64) -> $result {
            visit("order:7").await;
            $body
        }
    };
}
generated!(from_a_macro, "order:{id}", "1s", Result<u64, LockError>, id, Ok(id));

mod elsewhere {
    use lock_runtime as renamed;

    #[renamed::distributed_lock(key = "order:{id}")]
    pub(super) async fn by_its_path(id: u64) -> Result<u64, renamed::LockError> {
        super::visit("order:7").await;
        Ok(id)
    }
}

#[tokio::test(start_paused = true)]
async fn a_function() {
    assert_excludes("order:7", async || visible(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn raw_identifiers() {
    assert_excludes("order:7", async || r#async(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_function_that_calls_itself() {
    assert_excludes("tree", async || walk(5).await).await;
    super::with_client(async |_| assert_eq!(recursive(5).await.unwrap(), 5)).await;
}

#[tokio::test(start_paused = true)]
async fn a_function_in_a_function() {
    #[distributed_lock(key = "order:{id}")]
    async fn inner(id: u64) -> Result<u64, LockError> {
        visit("order:7").await;
        Ok(id)
    }
    assert_excludes("order:7", async || inner(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_function_that_a_macro_writes() {
    assert_excludes("order:7", async || from_a_macro(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn an_attribute_under_its_path() {
    assert_excludes("order:7", async || elsewhere::by_its_path(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_future_is_send_if_the_body_is() {
    assert!(is_send!(visible(7)) && is_send!(walk(1)));
    assert!(!is_send!(thread_bound(7)));
    assert_excludes("order:7", async || thread_bound(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_body_keeps_its_lines() {
    assert_excludes("where", async || line().await).await;
    super::ROOM
        .scope(
            super::Room::default(),
            super::with_client(async |_| assert_eq!(line().await.unwrap(), LINE)),
        )
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_body_that_panics_gives_its_lock_back() {
    super::with_client(async |locks| {
        let panic =
            futures_util::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(panics())).await;
        assert_eq!(
            *panic.unwrap_err().downcast::<&str>().unwrap(),
            "as it likes"
        );
        locks
            .exclusive("where")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}
