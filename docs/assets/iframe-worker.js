// Browsers start no worker from file://. Where the site is opened from a folder, the search runs in a frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = (this.inner = frame.contentWindow)
      inner.document.open()
      inner.document.write("<!doctype html><body></body>")
      inner.document.close()
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
