//! Return types that can hold a `LockError`, under any alias.

use std::{error::Error, fmt::Display, io};

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use lock_runtime::{FromLockError, LockError, distributed_lock};

use super::{assert_excludes, visit};

#[derive(Debug)]
enum PayError {
    Lock(LockError),
}

impl From<LockError> for PayError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

type Paid<T = u64, E = PayError> = std::result::Result<T, E>;

#[distributed_lock(key = "order:{id}")]
async fn io_result(id: u64) -> io::Result<u64> {
    visit("order:7").await;
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn anyhow_result(id: u64) -> anyhow::Result<u64> {
    visit("order:7").await;
    anyhow::ensure!(id == 7, "not mine");
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn alias(id: u64) -> Paid {
    visit("order:7").await;
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn boxed(id: u64) -> Result<u64, Box<dyn Error>> {
    visit("order:7").await;
    Ok(id.to_string().parse()?)
}

#[distributed_lock(key = "order:{id}")]
async fn opaque<'a>(
    id: u64,
    name: &'a str,
) -> Result<impl Iterator<Item = impl Display> + use<'a>, LockError> {
    visit("order:7").await;
    Ok(name.chars().take(id as usize))
}

#[distributed_lock(key = "order:{id}")]
async fn early(id: u64, text: &str) -> Result<u64, Box<dyn Error + Send + Sync>> {
    visit("order:7").await;
    if text.is_empty() {
        return Ok(id);
    }
    let number: u64 = text.parse()?;
    for n in 0.. {
        if n == number {
            return Ok(n);
        }
    }
    unreachable!()
}

/// `return` and `?` in a closure or an async block do not leave the function.
#[distributed_lock(key = "order:{id}")]
async fn blocks(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    let inner = || -> Result<u64, std::num::ParseIntError> { "1".parse() };
    let nested = async {
        let two: u64 = "2".parse()?;
        Ok::<u64, std::num::ParseIntError>(two)
    };
    Ok(id + inner().unwrap_or(0) + nested.await.unwrap_or(0))
}

#[distributed_lock(key = "order:{id}")]
async fn response(id: u64) -> Response {
    visit("order:7").await;
    id.to_string().into_response()
}

/// A type that holds a lock error by its own `FromLockError`.
struct Answer(Result<u64, LockError>);

impl FromLockError for Answer {
    fn from_lock_error(error: LockError) -> Self {
        Self(Err(error))
    }
}

#[distributed_lock(key = "order:{id}")]
async fn own_type(id: u64) -> Answer {
    visit("order:7").await;
    Answer(Ok(id))
}

#[tokio::test(start_paused = true)]
async fn results_under_an_alias() {
    assert_excludes("order:7", async || io_result(7).await).await;
    assert_excludes("order:7", async || anyhow_result(7).await).await;
    assert_excludes("order:7", async || {
        alias(7).await.map_err(|PayError::Lock(error)| error)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn boxed_errors() {
    assert_excludes("order:7", async || boxed(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn impl_trait_in_a_result() {
    assert_excludes("order:7", async || {
        assert_eq!(
            opaque(7, "abc")
                .await?
                .map(|c| c.to_string())
                .collect::<String>(),
            "abc"
        );
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn early_returns_and_question_marks() {
    assert_excludes("order:7", async || early(7, "").await).await;
    assert_excludes("order:7", async || early(7, "3").await).await;
    assert_excludes("order:7", async || {
        assert_eq!(blocks(7).await?, 10);
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn responses() {
    assert_excludes("order:7", async || {
        let response = response(7).await;
        if response.status() == StatusCode::OK {
            Ok(())
        } else {
            Err(response.status())
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn types_of_the_users_own() {
    assert_excludes("order:7", async || own_type(7).await.0).await;
}
