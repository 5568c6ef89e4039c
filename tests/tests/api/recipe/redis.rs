//! The script of the page on fencing.

use lock_runtime::{FencingToken, LockSpec};
use lock_tests::{
    RedisServer,
    place::{LONG, Place, in_time},
    shared_server, unique,
};
use redis::{RedisError, Script};

const PAGE: &str = include_str!("../../../../lock-runtime/guide/fencing/promise.md");

/// Data with the largest token that they have seen.
struct Data {
    server: &'static RedisServer,
    key: String,
}

impl Data {
    async fn new() -> Self {
        Self {
            server: shared_server().await,
            key: format!("{{{}}}", unique("account")),
        }
    }

    async fn write(&self, fence: impl ToString, data: &str) -> Result<(), RedisError> {
        let (_, rest) = PAGE.split_once("```lua\n").expect("the script of the page");
        let script = Script::new(rest.split("```").next().expect("its end"));
        let mut call = script.key(&self.key);
        call.key(format!("{}:fence", self.key))
            .arg(fence.to_string())
            .arg(data);
        call.invoke_async(&mut self.server.connection().await?)
            .await
    }

    async fn read(&self) -> Option<String> {
        self.server.query(&["GET", &self.key]).await
    }
}

#[tokio::test]
async fn a_smaller_token_changes_nothing() {
    // The last ones are equal as numbers of Lua.
    for [five, seven, six] in [
        ["5", "7", "6"],
        ["9", "10", "9"],
        ["99", "1000", "101"],
        ["9007199254740991", "9007199254740993", "9007199254740992"],
        [
            "9223372036854775805",
            "9223372036854775807",
            "9223372036854775806",
        ],
    ] {
        let data = Data::new().await;
        for (fence, text) in [(five, "a"), (seven, "b"), (seven, "c")] {
            data.write(fence, text).await.unwrap();
            assert_eq!(data.read().await.as_deref(), Some(text), "{fence}");
        }
        let error = data.write(six, "d").await.unwrap_err();
        assert_eq!(error.code(), Some("STALE"), "{error}");
        let shown = error.to_string();
        assert!(shown.contains(six) && shown.contains(seven), "{shown}");
        assert_eq!(data.read().await.as_deref(), Some("c"));
    }
}

#[tokio::test]
async fn a_text_that_is_no_token_changes_nothing() {
    let data = Data::new().await;
    for fence in ["", "0", "-1", "07", "1.5", "1e9", "a", "7\n", " 7"] {
        let error = data.write(fence, "d").await.unwrap_err();
        assert_ne!(error.code(), Some("STALE"), "{fence:?}: {error}");
        assert_eq!(data.read().await, None, "{fence:?}");
    }
}

#[tokio::test]
async fn a_holder_whose_lease_has_ended_is_refused() {
    in_time(async {
        let (place, data) = (Place::redis().await, Data::new().await);
        let locks = place.client().await;
        let late = locks
            .exclusive("account")
            .lease(LockSpec::MIN_LEASE)
            .no_renew();
        let late = late.acquire().await.unwrap();
        let next = locks.exclusive("account").wait(LONG);
        let next = next.acquire().await.unwrap();
        let write = |fence: FencingToken, text| data.write(fence, text);
        write(next.fence(), "next").await.unwrap();
        assert!(write(late.fence(), "late").await.is_err());
        assert_eq!(data.read().await.as_deref(), Some("next"));
        next.release().await.unwrap();
    })
    .await;
}
