//! Arguments of every kind, and bodies that move, borrow and change them.

use std::{
    fmt::{Debug, Display},
    sync::Arc,
};

use axum::extract::{Path, Query};
use lock_runtime::{LockError, distributed_lock};

use super::{assert_excludes, visit};

#[derive(Clone)]
struct Order {
    id: u64,
    shop: &'static str,
}

const ORDER: Order = Order {
    id: 7,
    shop: "north",
};

#[distributed_lock(key = "order:{id}")]
async fn handler(
    Path(id): Path<u64>,
    Query(_page): Query<Vec<(String, String)>>,
) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(id)
}

#[distributed_lock(key = "{shop}:{id}:{first}:{whole:?}:{a}{b}")]
async fn patterns(
    Order { id, shop }: Order,
    (first, _, (..)): (u8, u8, (u8, u8)),
    whole @ (Some(_) | None): Option<u8>,
    [a, .., b]: [char; 3],
    _: &str,
    &by_reference: &u64,
) -> Result<u64, LockError> {
    visit("north:7:1:Some(9):x%.z").await;
    Ok(id + by_reference)
}

#[distributed_lock(key = "order:{id}")]
async fn mutable(
    mut id: u64,
    mut names: Vec<String>,
    counter: &mut u64,
) -> Result<Vec<String>, LockError> {
    visit("order:7").await;
    id += 1;
    *counter += id;
    names.push(id.to_string());
    Ok(names)
}

#[distributed_lock(key("order:{}", order.id))]
async fn moved(order: Order, name: String) -> Result<(Order, String), LockError> {
    visit("order:7").await;
    let mine = order;
    let name = async move { name }.await;
    Ok((mine, name))
}

#[distributed_lock(key = "order:{id}")]
async fn borrowed<'a>(
    id: &u64,
    name: &'a str,
    rest: &'a [&str],
) -> Result<(&'a str, usize), LockError> {
    visit("order:7").await;
    Ok((name, rest.len() + *id as usize))
}

#[distributed_lock(key = "{prefix}:{id}")]
async fn generic<T, U, const N: usize>(
    id: T,
    prefix: U,
    rest: [u8; N],
) -> Result<(T, usize), LockError>
where
    T: Display + Clone + Send + Sync,
    for<'a> &'a U: Sized,
    U: Display + Debug,
{
    visit("order:7").await;
    Ok((id.clone(), rest.len()))
}

#[distributed_lock(key = "order:{N}")]
async fn constant<const N: u64>() -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(N)
}

#[distributed_lock(key = "order:{id}")]
async fn impl_trait(
    id: impl Display + Send,
    run: impl AsyncFn(u64) -> u64,
) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(run(id.to_string().len() as u64).await)
}

#[distributed_lock(key = "order:{id}")]
async fn dynamic(
    id: Arc<dyn Display + Send + Sync>,
    run: &mut dyn FnMut(),
) -> Result<(), LockError> {
    visit("order:7").await;
    run();
    Ok(())
}

#[distributed_lock(key = "order:{id}")]
async fn configured(#[cfg(any())] gone: u64, #[allow(unused)] id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(id)
}

/// Arguments with the names that the expansion uses do not conflict with it.
#[distributed_lock(key = "{__client}:{__a0}", held = lock)]
#[expect(clippy::too_many_arguments, reason = "there are as many names")]
async fn names_of_the_expansion(
    __client: u64,
    __request: u64,
    __entered: u64,
    __error: u64,
    __outcome: u64,
    __returned: u64,
    __held: u64,
    __k: u64,
    __a0: &str,
) -> Result<u64, LockError> {
    visit("7:x").await;
    assert_eq!(lock.key().as_str(), "7:x");
    Ok(__client + __request + __entered + __error + __outcome + __returned + __held + __k)
}

#[distributed_lock(key("order:{}:{}", parse(id)?, later(id).await))]
async fn question_mark_in_the_key(
    id: &str,
) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    visit("order:7:7").await;
    Ok(parse(id)?)
}

fn parse(id: &str) -> Result<u64, std::num::ParseIntError> {
    id.parse()
}

async fn later(id: &str) -> &str {
    tokio::task::yield_now().await;
    id
}

#[tokio::test(start_paused = true)]
async fn patterns_of_extractors() {
    assert_excludes("order:7", async || {
        handler(Path(7), Query(Vec::new())).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn patterns_of_all_kinds() {
    assert_excludes("north:7:1:Some(9):x%.z", async || {
        patterns(ORDER, (1, 2, (3, 4)), Some(9), ['x', 'y', 'z'], "", &1).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn mutable_arguments() {
    assert_excludes("order:7", async || {
        let mut counter = 0;
        let names = mutable(7, vec!["a".into()], &mut counter).await?;
        assert_eq!((names, counter), (vec!["a".into(), "8".into()], 8));
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn arguments_that_the_body_moves() {
    assert_excludes("order:7", async || {
        moved(ORDER, "a".into()).await.map(|(order, _)| order.shop)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn lifetimes() {
    assert_excludes("order:7", async || {
        let name = String::from("a");
        let (same, rest) = borrowed(&7, &name, &["x"]).await?;
        assert_eq!((same, rest), ("a", 8));
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn generics() {
    assert_excludes("order:7", async || generic(7, "order", [0; 3]).await).await;
    assert_excludes("order:7", async || constant::<7>().await).await;
}

#[tokio::test(start_paused = true)]
async fn impl_trait_and_dyn_trait() {
    assert_excludes("order:7", async || impl_trait(7, async |n| n + 1).await).await;
    assert_excludes("order:7", async || {
        let mut runs = 0;
        dynamic(Arc::new(7), &mut || runs += 1).await?;
        assert_eq!(runs, 1);
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn arguments_with_attributes() {
    assert_excludes("order:7", async || configured(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn arguments_with_names_of_the_expansion() {
    assert_excludes("7:x", async || {
        assert_eq!(
            names_of_the_expansion(7, 1, 1, 1, 1, 1, 1, 1, "x").await?,
            14
        );
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_key_that_may_fail_and_wait() {
    assert_excludes("order:7:7", async || question_mark_in_the_key("7").await).await;
    super::with_client(async |_| {
        assert!(
            question_mark_in_the_key("x")
                .await
                .unwrap_err()
                .is::<std::num::ParseIntError>()
        );
    })
    .await;
}
